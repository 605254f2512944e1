"""The updates of a round as rules see them: block by block of every tensor, one row per client.

A coordinate's *holders* are the clients that sent it. Coordinates with the same holders are a *coverage class*: rings
of nested tiers, overlaps of windows. Nothing is ever padded with zeros: who does not hold a coordinate has no say.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.levels import Survivors
from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import WHOLE, Index, Where, scatter_index
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Update

MOST_WEIGHT = 3.0  # times the median: what a client says of its number of examples is not proven
MOST_PIECES = (
    6  # up to here classes are sets of pieces, at most 63; beyond, all coordinates of as many holders are one
)
BLOCK = 2**22  # numbers that are looked at together, of all clients


@dataclass(frozen=True)
class Block:
    """Some rows of one tensor, flat: what each client sent of them. All have shape (clients, coordinates) or less."""

    name: str
    first: int  # row of the tensor
    clients: list[int]  # who may hold some of it, as numbers of ``Answers.updates``
    values: Tensor  # float32 or float64; 0 where nobody sent anything
    held: Tensor  # who sent what
    base: Tensor | None  # what was there before, flat; None of what the server does not know yet
    classes: Tensor  # coordinate -> number of its coverage class

    @property
    def steps(self) -> Tensor:
        """How far each client went, in float64: what is absurdly large has a square too; 0 where it holds nothing."""
        assert self.base is not None
        return torch.where(self.held, self.values.double() - self.base.double(), 0.0)


@dataclass(frozen=True)
class Answers:
    """The updates in the order of their clients, and what they answer to."""

    base: Mapping[str, Tensor]
    updates: Sequence[Update]
    model: ElasticModel
    weights: Sequence[float]  # how much each counts

    @classmethod
    def of(
        cls,
        base: Mapping[str, Tensor],
        updates: Sequence[Update],
        model: ElasticModel,
        weight: Callable[[Update], float],
    ) -> Answers:
        """Those that count at all; none for more than some times the median."""
        ordered = sorted((each for each in updates if weight(each) > 0), key=lambda each: each.client)
        said = [weight(each) for each in ordered]
        most = MOST_WEIGHT * statistics.median_low(said) if said else 0.0
        return cls(base, ordered, model, [min(each, most) for each in said])

    @cached_property
    def names(self) -> list[str]:
        """The tensors that somebody sent."""
        return sorted({name for update in self.updates for name in update.patch.values})

    def is_step(self, name: str) -> bool:
        """Whether a tensor goes on from where it was: trained weights. Running statistics and counts are measured."""
        old = self.base.get(name)
        return old is not None and old.is_floating_point() and plain(name) in self.model.trainable

    @cached_property
    def pieces(self) -> list[int]:
        """For each client the number of its piece: who holds the same tensors at the same cut has the same."""
        numbers: dict[object, int] = {}
        keys = [(each.patch.cut, frozenset(each.patch.values)) for each in self.updates]
        hashed = [(cut.digest, names) for cut, names in keys]
        return [numbers.setdefault(key, len(numbers)) for key in hashed]

    @cached_property
    def tables(self) -> list[dict[str, Where]]:
        """Where the tensors of each client lie."""
        return [self.model.table(each.patch.cut) for each in self.updates]

    @property
    def by_sets(self) -> bool:
        """Whether classes are sets of pieces; where cuts are drawn for each client, numbers of holders."""
        return max(self.pieces, default=0) < MOST_PIECES

    @property
    def number_of_classes(self) -> int:
        """Above all numbers of classes; 0 is the class that nobody holds."""
        return 2**MOST_PIECES if self.by_sets else len(self.updates) + 1

    def holders(self, of_class: int) -> int:
        """How many clients hold a class."""
        return sum(of_class >> piece & 1 for piece in self.pieces) if self.by_sets else of_class

    def blocks(self, name: str, values: bool = True) -> Iterator[Block]:
        """One tensor, some rows at a time; without ``values``, only who holds what."""
        senders = [number for number, each in enumerate(self.updates) if name in each.patch.values]
        first = self.updates[senders[0]].patch.values[name]
        old = self.base.get(name)
        shape = tuple(old.shape if old is not None else first.shape) or (1,)
        wide = torch.promote_types(first.dtype, torch.float32)
        wide = wide if first.is_floating_point() else torch.float64
        inner = max(1, old.numel() if old is not None else first.numel()) // max(1, shape[0])
        rows = max(1, BLOCK // max(1, inner * len(senders)))
        for start in range(0, shape[0], rows):
            end = min(start + rows, shape[0])
            size, part = (end - start, *shape[1:]), (len(senders), (end - start) * inner)
            held, classes = self._held(name, senders, size, start)
            table = torch.zeros(part if values else (0, 0), dtype=wide, device=first.device)
            for row, number in enumerate(senders if values else ()):
                sent = self.updates[number].patch.values[name]
                put(table[row].view(size), self.tables[number].get(name), sent, start, inner)
            before = None if old is None else old.reshape(shape)[start:end].reshape(-1)
            yield Block(name, start, senders, table, held, before, classes)

    def _held(
        self, name: str, senders: Sequence[int], size: tuple[int, ...], start: int
    ) -> tuple[Tensor, Tensor]:
        """Who holds which coordinates, and the class of each; clients of the same piece hold the same."""
        device = self.updates[senders[0]].patch.values[name].device
        of_piece: dict[int, Tensor] = {}
        inner = max(1, torch.Size(size[1:]).numel())
        for number in senders:
            if self.pieces[number] not in of_piece:
                mask = torch.zeros(size, dtype=torch.bool, device=device)
                put(mask, self.tables[number].get(name), True, start, inner)
                of_piece[self.pieces[number]] = mask.view(-1)
        held = torch.stack([of_piece[self.pieces[number]] for number in senders])
        if self.by_sets:
            marks = [mask.long() << piece for piece, mask in of_piece.items()]
            return held, torch.stack(marks).sum(0)
        return held, held.sum(0)


def put(target: Tensor, where: Where | None, values: Tensor | bool, start: int, inner: int) -> None:
    """Write those values that lie in some rows of a tensor into these rows: from ``start``, as many as ``target`` has.

    Without ``where``, values fill the whole tensor; ``inner`` is the number of coordinates in a row.
    """
    end = start + len(target)
    if isinstance(where, Survivors):
        positions = where.positions.to(target.device)
        low, high = _between(positions, start * inner, end * inner)
        target.view(-1)[positions[low:high] - start * inner] = _rows(values, low, high)
        return
    where = where or (WHOLE,) * target.dim()  # a single number lies nowhere: it has no axes
    along = where[0]
    inside: Index
    if isinstance(along, slice):
        stop = end if along.stop is None else min(end, along.stop)
        low, high, inside = start, stop, slice(0, stop - start)
    else:
        positions = along.to(target.device)
        low, high = _between(positions, start, end)
        inside = positions[low:high] - start
    if high > low:
        view, mesh = scatter_index(target, (inside, *where[1:]))
        view[mesh or ...] = _rows(values, low, high)


def _between(positions: Tensor, start: int, end: int) -> tuple[int, int]:
    """Which of these ascending positions lie in a range."""
    bounds = torch.tensor([start, end], device=positions.device)
    low, high = torch.searchsorted(positions, bounds).tolist()
    return low, high


def _rows(values: Tensor | bool, low: int, high: int) -> Tensor | bool:
    return values if isinstance(values, bool) else values.reshape(values.shape or (1,))[low:high]
