"""Makes the tape of a step: what PyTorch did in it, below autograd, less what need not be done again."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtailor.client.tape import Operation, Step, Tape
from fedtailor.data.batches import Batch, map_tensors, values_of
from fedtailor.seeds import Seeds

# Of results that are kept for a client: beyond, a step is long enough by itself; and for all who take it together
MOST_BYTES, MOST_IN_ALL = 2**20, 2**26
MOST_CALLS = 300
# Operations that only make a tensor, which stays as it is unless one that follows writes to it
MAKERS = frozenset(
    {"ones_like", "zeros_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "ones",
     "zeros", "full", "arange", "scalar_tensor", "empty", "empty_strided", "new_empty_strided"}
)  # fmt: skip
UNFIT = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Unrecordable(Exception):  # noqa: N818  (a step that is run as it is)
    """A step that cannot be run from a tape."""


@dataclass(frozen=True)
class Call:
    """One operation of a step, on which tensors, and what came of it."""

    operation: Any  # torch._ops.OpOverload, which PyTorch does not export by name
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor | None, ...]  # None: what was not asked for


class _Recorder(TorchDispatchMode):
    """Notes what PyTorch does inside the block, below autograd: backward passes too."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.bytes, self.most_bytes = 0, most_bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep PyTorch's compiler away would load it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else (found,)
        if any(tag in func.tags for tag in UNFIT) or not all(_is_plain(each) for each in results):
            raise Unrecordable(str(func))
        self.calls.append(Call(func, args, kwargs or {}, tuple(results)))
        self.bytes += sum(each.nbytes for each in results if each is not None and not _shares(each, args))
        if len(self.calls) > MOST_CALLS or self.bytes > self.most_bytes:
            raise Unrecordable("too long, or too large")
        return found


def recorded(
    step: Step,
    batch: Batch,
    leaves: Sequence[Tensor],
    held: Sequence[Tensor],
    constants: Sequence[Tensor] = (),
    clients: int = 1,
) -> Tape | None:
    """The tape of a step, of so many clients, on leaves that stay where they are; None where there can be none.

    ``held`` are all tensors that a step may change, the leaves among them; ``constants`` what else there is and it
    should not. None of them is changed when this returns, nor the batch, nor PyTorch's generator.
    """
    kept = [*held, *constants]
    before = [value.detach().clone() for value in kept]
    try:
        with Seeds(0).scope("recording"):
            truth = _truth(step, map_tensors(batch, torch.clone), leaves, held)
            _put_back(kept, before)
            most = min(MOST_BYTES * clients, MOST_IN_ALL)
            tape = _tape_of(step, map_tensors(batch, torch.clone), leaves, held, most)
            _put_back(kept, before)
            tape.run(batch)
            return tape if _same(truth, [tape.loss, *tape.gradients, *held]) else None
    except (Unrecordable, RuntimeError, TypeError):  # also what a recorder cannot follow
        return None
    finally:
        for leaf in leaves:
            leaf.grad = None
        _put_back(kept, before)


def _truth(step: Step, batch: Batch, leaves: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """What a step leaves that nobody records."""
    loss = step(batch)
    loss.backward()
    return [loss.detach(), *map(_taken, leaves), *(value.detach().clone() for value in held)]


def _tape_of(
    step: Step, inputs: Batch, leaves: Sequence[Tensor], held: Sequence[Tensor], most_bytes: int
) -> Tape:
    recorder = _Recorder(most_bytes)
    with recorder:
        loss = step(inputs)
        # And not backward, which copies what it does not own alone
        gradients = list(torch.autograd.grad(loss, leaves))
    calls = recorder.calls
    _check_writes(calls, held)
    operations = list(_operations(calls))
    lasting = {_memory(value) for call in calls if _makes(call) for value in _results(call)}
    lasting |= {_memory(value) for value in (*held, *values_of(inputs))}
    for place, own in enumerate(each_its_own(gradients, lasting)):
        if own is not gradients[place]:
            operations.append(partial(own.copy_, gradients[place]))
            gradients[place] = own
    return Tape(tuple(operations), inputs, loss.detach(), gradients)


def each_its_own(tensors: Sequence[Tensor], taken: Collection[int] = ()) -> Iterator[Tensor]:
    """The tensors, those as copies whose memory is an earlier one's, or ``taken``: each may be changed in place."""
    known = set(taken)
    for tensor in tensors:
        yield tensor.clone() if _memory(tensor) in known else tensor
        known.add(_memory(tensor))


def _check_writes(calls: Sequence[Call], held: Sequence[Tensor]) -> None:
    """Refuse a step that writes to what no operation makes anew, and nobody puts back: it would add up."""
    allowed = {_memory(value) for value in held}
    for call in calls:
        if not call.operation._schema.is_mutable and ("empty" in _name(call) or not _makes(call)):
            allowed |= {_memory(value) for value in _results(call) if not _shares(value, call.args)}
        for value in _written(call):
            if _memory(value) not in allowed:
                raise Unrecordable(f"{call.operation} writes to what lasts")


def _taken(leaf: Tensor) -> Tensor:
    """The gradient that a step has left on a leaf."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None or gradient.is_sparse:
        raise Unrecordable("a weight without a gradient, or with a sparse one")
    return gradient


@torch.no_grad()
def _put_back(held: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for each, value in zip(held, values, strict=True):
        each.copy_(value)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two outcomes have the same bits, in the same layout."""
    return all(
        a.stride() == b.stride() and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@torch.no_grad()
def _operations(calls: Sequence[Call]) -> Iterator[Operation]:
    """What is left to run of what was recorded; each is run once, to find out whether it can be."""
    for call in calls:
        results = _results(call)
        view = all(_shares(value, call.args) for value in results)
        if call.operation._schema.is_mutable or not (_makes(call) or view):
            yield next(_working(call))


def _name(call: Call) -> str:
    return str(call.operation._schema.name).removeprefix("aten::")


def _makes(call: Call) -> bool:
    """Whether it only makes a tensor, which stays as it is: those who write to it are refused, unless it is empty."""
    return _name(call) in MAKERS


def _results(call: Call) -> list[Tensor]:
    return [value for value in call.results if value is not None and value.numel()]


def _working(call: Call) -> Iterator[Operation]:
    """The ways to run a call that work, the fastest first."""
    for operation in _ways(call):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                operation()
            except (RuntimeError, TypeError, Warning):  # takes other arguments, or has no kernel
                continue
        yield operation
    raise Unrecordable(str(call.operation))


def _ways(call: Call) -> Iterator[Operation]:
    """Into the tensors that were recorded: by PyTorch's own function, by the operation's, or by copying."""
    operation, args, kwargs, results = call.operation, call.args, call.kwargs, call.results
    if operation._schema.is_mutable:
        yield partial(operation, *args, **kwargs)
        return
    name = _name(call)
    if name == "relu":  # PyTorch has none that writes where it is told; this is what it calls
        yield partial(torch.clamp_min, *args, 0, out=results[0])
    function = getattr(torch._C._VariableFunctions, name, None)
    if function is not None and len(results) == 1:
        yield partial(function, *args, **kwargs, out=results[0])
    # Losses that reduce use the place for what is not reduced yet, and warn of it every time; this one does not
    reduces = any(each.name == "reduction" for each in operation._schema.arguments)
    direct = None not in results and (not reduces or name.startswith("nll_loss"))
    for other, places in _writing(operation) if direct else ():
        if len(places) == len(results):
            yield partial(other, *args, **kwargs, **dict(zip(places, results, strict=True)))
    yield partial(_copied, operation, args, kwargs, results)


def _writing(operation: Any) -> Iterator[tuple[Any, list[str]]]:
    """The operations of the same arguments that write where they are told, and how they call those places."""
    asked = [(each.name, str(each.type)) for each in operation._schema.arguments]
    packet = operation.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        places = [each.name for each in other._schema.arguments if each.is_out]
        others = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        if places and others == asked:
            yield other, places


def _copied(operation: Any, args: Any, kwargs: Any, results: Sequence[Tensor | None]) -> None:
    found = operation(*args, **kwargs)
    for place, value in zip(results, found if isinstance(found, tuple | list) else (found,), strict=True):
        if place is not None:
            place.copy_(value)


def _written(call: Call) -> Iterator[Tensor]:
    """What a call writes to; of batch norms running statistics, of which some do not tell."""
    for place, argument in enumerate(call.operation._schema.arguments):
        says = argument.alias_info is not None and argument.alias_info.is_write
        if says or ("batch_norm" in _name(call) and argument.name in ("running_mean", "running_var")):
            value = call.args[place] if place < len(call.args) else call.kwargs.get(argument.name)
            yield from value if isinstance(value, list) else [value] if isinstance(value, Tensor) else []


def _is_plain(value: object) -> bool:
    return value is None or (isinstance(value, Tensor) and value.layout == torch.strided)


def _shares(value: Tensor, others: object) -> bool:
    """Whether a tensor lies in the memory of one of these."""
    if isinstance(others, Tensor):
        return others.layout == torch.strided and _memory(others) == _memory(value)
    return isinstance(others, tuple | list) and any(_shares(value, each) for each in others)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
