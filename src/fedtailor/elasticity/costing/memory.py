"""How much memory training takes: an estimate from what autograd saves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from fedtailor.data.batches import Batch, map_tensors
from fedtailor.elasticity.costing.cost import Sizes
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.errors import require


@dataclass(frozen=True)
class Workload:
    """One training step as a device runs it."""

    batch_size: int = 32
    # Numbers that the optimiser keeps for each parameter: 1 with momentum, 2 with Adam
    optimiser_slots: int = 0
    parts: int = 1  # in which the batch is computed, one after the other

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "workload.batch_size", self.batch_size, "at least 1")
        require(self.optimiser_slots >= 0, "workload.optimiser_slots", self.optimiser_slots, "at least 0")
        require(1 <= self.parts <= self.batch_size, "workload.parts", self.parts, "1 to batch_size")

    @property
    def at_once(self) -> int:
        """The examples whose activations are in memory together."""
        return -(-self.batch_size // self.parts)


def saved_parts(model: Pieces, cut: Cut, batch_size: int) -> list[Sizes]:
    """What autograd saves in one forward pass on real tensors, each storage as sizes to be multiplied to bytes."""
    model.table(cut)
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in _tensors(model, cut).items()}
    rows = torch.arange(batch_size)
    batch = map_tensors(model.example, lambda column: column.detach().index_select(0, rows % len(column)))
    with torch.random.fork_rng(devices=[]):  # dropout must not move the caller's generator
        return _saved(model, cut, weights, batch)


def imagined_parts(model: Pieces, cut: Cut, batch_size: int) -> list[Sizes]:
    """The same on tensors that have sizes but no memory: fast, and blind to the workspaces of fused kernels."""
    model.table(cut)  # its index tensors are kept for later: they must not be made inside the mode
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {
            name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in _tensors(model, cut).items()
        }
        batch = map_tensors(
            model.example, lambda column: torch.empty((batch_size, *column.shape[1:]), dtype=column.dtype)
        )
        return _saved(model, cut, weights, batch)


def _tensors(model: Pieces, cut: Cut) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    names = (name for name in model.groups.extents if name not in model.constants and name not in cut.absent)
    return {name: (model.shape(name, cut), model.dtype(name)) for name in names}


def _saved(model: Pieces, cut: Cut, weights: dict[str, Tensor], batch: Batch) -> list[Sizes]:
    """Every storage that the graph of one training step keeps alive, apart from the weights themselves."""
    for name in model.trainable & weights.keys():
        weights[name].requires_grad_()
    known = {_storage(value) for value in weights.values()}
    parts: list[Sizes] = []
    workspaces: list[int] = []
    alive: list[Tensor] = []  # an address that is free again must not be taken for one that was seen

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            known.add(_storage(tensor))
            alive.append(tensor)
            if tensor.dtype == torch.uint8 and tensor.dim() == 1:
                workspaces.append(tensor.numel())
            else:
                parts.append(_bytes_of(tensor))
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.forward(weights, cut, batch, mode="train")
        model.objective.loss(output, batch)
    return parts + [(size,) for size in touched(workspaces)]


def touched(workspaces: list[int]) -> list[int]:
    """Bytes of the workspaces of fused recurrent layers that are in memory at the peak.

    A third of a workspace holds gates and states; the rest is first written to in the layer's backward pass, and no
    two layers are in theirs at once.
    """
    ascending = sorted(workspaces)
    return [size // 3 for size in ascending[:-1]] + ascending[-1:]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Sizes:
    """The storage of a tensor as sizes; a view keeps all of the tensor alive that it looks into."""
    held = tensor.untyped_storage().nbytes()
    for whole in (tensor, tensor._base):
        if whole is not None and whole.numel() * whole.element_size() == held:
            return (whole.element_size(), *whole.shape)
    return (held,)
