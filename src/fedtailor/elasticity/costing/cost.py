"""What a piece of the model costs, and how its multiply-accumulates are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedtailor.elasticity.costing.meta_shapes import SHAPES

Sizes = tuple[int, ...]  # numbers whose product is one part of a cost

aten = torch.ops.aten


@dataclass(frozen=True)
class Cost:
    """The cost of one piece of the model, per example where that matters."""

    params: int  # numbers that the optimiser may move; shared tensors once
    macs: int  # multiply-accumulates of one example's forward pass, one for each bias addition
    # Parameters and buffers, as they are stored and sent; without what is frozen, which is neither
    bytes: int
    training_memory: int | None = None  # bytes that training takes: an estimate; None where nobody asked
    step_time: int | None = None  # nanoseconds of one training step, measured; None where nobody asked

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.params + other.params,
            self.macs + other.macs,
            self.bytes + other.bytes,
            _sum(self.training_memory, other.training_memory),
            _sum(self.step_time, other.step_time),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def examples_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many examples the inputs of a module hold."""
    leaves = tree_leaves((args, kwargs))
    return int(next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()))


def products(
    shell: nn.Module,
    weights: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    answers: Sequence[Any] = (),
) -> list[Sizes]:
    """Every matrix product, convolution and bias addition of a forward pass, as sizes to be multiplied.

    The pass runs on the ``meta`` device, where nothing is computed and where recurrent layers and attention
    fall apart into the products that they are made of; CPU tensors would hide them in fused kernels. ``answers`` are
    what the code hears when it asks for values (is the attention mask all ones?), in the order in which it asks.
    """
    meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    on_meta = {
        name: value if value.is_meta else torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in weights.items()
    }
    recorder = _ProductRecorder(on_meta, answers)
    with torch.no_grad(), plain_attention(), recorder:
        functional_call(shell, on_meta, *meta, tie_weights=False)
    return recorder.parts


def forward_macs(module: nn.Module, args: tuple[Any, ...]) -> int:
    """Multiply-accumulates of one example's forward pass through a whole module; nothing is traced or computed."""
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    parts = products(module, weights, args, {})
    return sum(math.prod(sizes) for sizes in parts) // examples_in(args, {})


@contextmanager
def plain_attention() -> Iterator[None]:
    """Transformer layers as the operators they are made of: fused ones hide their biases, and no format knows them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Watching(TorchDispatchMode):
    """Sees every operation that PyTorch executes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to tell PyTorch's compiler to leave this alone would load it, for seconds, and it is never used here."""
        return False


class Asked(Watching):
    """Writes down every number that code reads off a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.answers += [output] if func.overloadpacket is aten._local_scalar_dense else []
        return output


class _ProductRecorder(Watching):
    """Writes down the sizes of each product that PyTorch executes."""

    def __init__(self, weights: Mapping[str, Tensor], answers: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[Sizes] = []
        self.answers = iter(answers)
        self._vectors = {_storage(value) for value in weights.values() if value.dim() == 1}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket
        if operation is aten._local_scalar_dense and (answer := next(self.answers, None)) is not None:
            return answer
        output = SHAPES[operation](*args) if operation in SHAPES else NotImplemented
        if output is NotImplemented:
            output = func(*args, **(kwargs or {}))
        if operation in PRODUCTS:
            self.parts.append(PRODUCTS[operation](args, output))
        if self._adds_bias(operation, args):
            self.parts.append(tuple(output.shape))
        return output

    def _adds_bias(self, operation: Any, args: tuple[Any, ...]) -> bool:
        if operation is aten.convolution:
            return args[2] is not None
        if operation is aten.addmm:
            return bool(args[0].dim() == 1)  # anything larger is a sum of matrices
        if operation in (aten.add, aten.add_):
            return any(isinstance(value, Tensor) and _storage(value) in self._vectors for value in args[:2])
        return False


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _convolution(args: tuple[Any, ...], output: Tensor) -> Sizes:
    """k * k * in / groups for every output position; transposed, k * k * out / groups for every input position."""
    images, weight, transposed = args[0], args[1], args[6]
    return (*(images if transposed else output).shape, *weight.shape[1:])


PRODUCTS: dict[Any, Callable[[tuple[Any, ...], Tensor], Sizes]] = {
    aten.convolution: _convolution,
    aten.mm: lambda args, output: (*output.shape, args[0].shape[1]),
    aten.addmm: lambda args, output: (*output.shape, args[1].shape[1]),
    aten.bmm: lambda args, output: (*output.shape, args[0].shape[2]),
    aten.baddbmm: lambda args, output: (*output.shape, args[1].shape[2]),
    aten.mv: lambda args, _: tuple(args[0].shape),
    aten.dot: lambda args, _: tuple(args[0].shape),
    aten._trilinear: lambda args, output: (
        *output.shape,
        *args[1].shape[1:],
    ),  # nn.Bilinear: weight (out, a, b)
}
