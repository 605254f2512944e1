"""Which weights of a traced module are composed, from how large a basis, and in which of two ways they are computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fedtailor.data.batches import inputs_of
from fedtailor.elasticity.costing.cost import examples_in
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.cutting.selections import kept, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import POLICIES
from fedtailor.elasticity.tracing.copies import named_tensors
from fedtailor.errors import FedtailorError, unknown

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
SMALLEST_BASIS = 2  # a single vector has next to nothing to share

Form = Literal["composed", "two_step"]


@dataclass(frozen=True)
class Composed:
    """One composed weight."""

    tensor: str
    layer: str
    fragment: int  # R1, the inputs of one basis vector
    bases: int  # R2
    kernel: tuple[int, ...]
    biases: tuple[str, ...]  # of the layer
    positions: int | None  # outputs per channel and example; None: the layer cannot be computed in two steps

    @property
    def basis(self) -> str:
        """The name of V."""
        return tagged(self.tensor, "basis")

    def coefficients(self, cut: Cut) -> str:
        """The name of U_p of a width."""
        return tagged(tagged(self.tensor, "coefficients"), cut.tag)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the basis."""
        return (self.bases, self.fragment, *self.kernel)

    def macs(self, form: Form, outputs: int, inputs: int, batch: int) -> int:
        """Multiply-accumulates of one example's forward pass; a weight is composed once for a whole batch."""
        positions, area = self.positions or 0, prod(self.kernel)
        if form == "two_step":
            first = inputs * self.bases * area
            return positions * (first + outputs * (inputs // self.fragment) * self.bases)
        return positions * outputs * inputs * area + -(-outputs * inputs * area * self.bases // batch)

    def dense_macs(self, outputs: int, inputs: int) -> int:
        """Multiply-accumulates of one example's forward pass with a weight that need not be composed."""
        return (self.positions or 0) * outputs * inputs * prod(self.kernel)

    def cheaper(self, outputs: int, inputs: int, batch: int) -> Form:
        """The form with fewer multiply-accumulates."""
        if self.positions is None:
            return "composed"
        composed, two_step = (self.macs(form, outputs, inputs, batch) for form in get_args(Form))
        return "two_step" if two_step < composed else "composed"


@dataclass(frozen=True)
class Plan:
    """What becomes of every tensor of a model."""

    composed: tuple[Composed, ...]
    private: tuple[str, ...]  # tensors that each width has for itself
    absent: tuple[str, ...]  # biases of composed layers that no width has: they are zero


@dataclass(frozen=True)
class Recipe:
    """How a plan is made. R1 and R2 are shares of the full layer's inputs and outputs unless ``ranks`` names them."""

    widths: tuple[Fraction, ...]  # R1 divides the inputs of all of them
    align: int
    input_share: Fraction
    output_share: Fraction
    ranks: tuple[tuple[str, tuple[int, int]], ...]  # weight -> R1, R2; 0, 0: not composed
    orthogonal: bool  # whether R2 basis vectors must fit into R1 k k dimensions
    biases: bool  # whether composed layers keep theirs


def plan(model: ElasticModel, recipe: Recipe) -> Plan:
    """What is composed, by default: convolutions larger than 1 x 1, linear and recurrent layers between the first and
    the last layer; a named weight of any of these kinds is composed wherever it stands. Remembered with the model.
    """
    return model.once(("composition", recipe), lambda: _planned(model, recipe))


def _planned(model: ElasticModel, recipe: Recipe) -> Plan:
    composed = tuple(_composed(model, recipe))
    if not composed:
        raise FedtailorError(
            "no layer of this model can be composed: expected convolutions larger than 1 x 1, linear or recurrent "
            "layers between the first and the last one whose inputs at all of method.widths have a common divisor, or "
            "weights named in method.ranks"
        )
    absent = () if recipe.biases else tuple(dict.fromkeys(b for each in composed for b in each.biases))
    apart = {each.tensor for each in composed} | set(absent)
    return Plan(composed, tuple(sorted(POLICIES["averaged"].travelling(model) - apart)), absent)


def _composed(model: ElasticModel, recipe: Recipe) -> Iterator[Composed]:
    named = dict(recipe.ranks)
    candidates = {tensor: path for path, tensor in _composable(model)}
    for tensor in named:
        if tensor not in candidates:
            raise unknown("weight that can be composed", tensor, candidates)
    positions = _positions(model, set(candidates.values()))
    cuts = [prefix(model.groups, width, recipe.align) for width in recipe.widths]
    for tensor, path in candidates.items():
        outputs, inputs, *kernel = model.shape(tensor, Cut.everything())
        common = gcd(*(model.shape(tensor, cut)[1] for cut in cuts))
        if tensor in named:
            fragment, bases = named[tensor]
            if (fragment, bases) == (0, 0):
                continue
            _check(tensor, fragment, bases, common, outputs * inputs, prod(kernel), recipe.orthogonal)
        else:
            fragment = _largest_divisor(common, kept(recipe.input_share, inputs))
            bases = min(
                kept(recipe.output_share, outputs), prod(kernel) * fragment
            )  # so many can be orthogonal
            if not _in_the_middle(model, tensor, path) or bases < SMALLEST_BASIS:
                continue
        layer = model.module.get_submodule(path)
        own = [name for name, _ in layer.named_parameters(recurse=False) if name.startswith("bias")]
        biases = tuple(f"{path}.{name}" if path else name for name in own)
        yield Composed(tensor, path, fragment, bases, tuple(kernel), biases, positions.get(path))


def _composable(model: ElasticModel) -> Iterator[tuple[str, str]]:
    """Layers and their weights for which a composition is defined."""
    groups = model.groups
    shared = {*groups.ties, *groups.ties.values()}
    for path, layer in model.module.named_modules():
        if isinstance(layer, RECURRENT):
            names = [name for name, _ in layer.named_parameters(recurse=False) if name.startswith("weight_")]
            names = [name for name in names if not name.startswith("weight_hr")]
        elif type(layer) is nn.Linear or (type(layer) in CONVOLUTIONS and layer.groups == 1):
            names = ["weight"]
        else:
            continue
        for name in names:
            tensor = f"{path}.{name}" if path else name
            if tensor in model.trainable and tensor not in shared:
                yield path, tensor


def _in_the_middle(model: ElasticModel, tensor: str, path: str) -> bool:
    """Neither the first layer, nor a 1 x 1 convolution (a shortcut), nor the last layer."""
    groups, layer = model.groups, model.module.get_submodule(path)
    rows, columns = ({axis.group for axis in extent.axes} for extent in groups.extents[tensor][:2])
    pointwise = isinstance(layer, CONVOLUTIONS) and prod(layer.kernel_size) == 1
    made = {group for produced in groups.producers.values() for group in produced}
    return not pointwise and not rows & set(groups.outputs) and bool(columns & made)


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)


def _check(
    tensor: str, fragment: int, bases: int, common: int, entries: int, room: int, orthogonal: bool
) -> None:
    place = f"method.ranks.{tensor} = [{fragment}, {bases}]"
    if fragment < 1 or common % fragment:
        raise FedtailorError(
            f"{place}: expected an R1 that divides {common}, a divisor of every width's inputs"
        )
    if not 1 <= bases <= entries // fragment:
        raise FedtailorError(
            f"{place}: expected an R2 from 1 to {entries // fragment}, the number of fragments"
        )
    if orthogonal and bases > room * fragment:
        raise FedtailorError(
            f"{place}: expected an R2 of at most {room * fragment} (R1 times the kernel): more vectors cannot be "
            "orthogonal; or set method.regulariser = 'off'"
        )


def _positions(model: ElasticModel, paths: Collection[str]) -> dict[str, int]:
    """For each layer that can be computed in two steps, how many outputs each of its channels has for one example.

    A recurrent layer cannot, nor can a layer whose weight is used without calling it. A strided 1 x 1 convolution of
    few channels is left out too: see ``elasticity.running.layout``.
    """
    shell, counted = model.shell(Cut.everything()), dict[str, int]()
    called = [path for path, layer in shell.named_modules() if path in paths and _has_two_steps(layer)]
    values = {name: value.to("meta") for name, value in named_tensors(model.module).items()}
    inputs = inputs_of(model.example)
    meta: Any = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
    with torch.no_grad(), _watched(shell, called, counted):
        functional_call(
            shell, model.complete(values, Cut.everything(), device="meta"), *meta, tie_weights=False
        )
    return {path: count // examples_in(*inputs) for path, count in counted.items()}


def _has_two_steps(layer: nn.Module) -> bool:
    if isinstance(layer, CONVOLUTIONS):
        return prod(layer.kernel_size) > 1 or max(layer.stride) == 1
    return isinstance(layer, nn.Linear)


@contextmanager
def _watched(shell: nn.Module, paths: Sequence[str], counted: dict[str, int]) -> Iterator[None]:
    def note(path: str) -> Any:
        def hook(layer: nn.Module, _args: Any, output: Tensor) -> None:
            counted[path] = counted.get(path, 0) + output.numel() // len(layer.weight)  # type: ignore[arg-type]

        return hook

    handles = [shell.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
