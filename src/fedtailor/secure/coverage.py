"""Classes of coordinates: those that the same tiers hold. A client's update as one row of numbers for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Survivors
from fedtailor.elasticity.cutting.names import is_tagged
from fedtailor.elasticity.cutting.patch import Index, Where, gather, scatter
from fedtailor.elasticity.model import ElasticModel
from fedtailor.privacy.sums import Piece, whole_or

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Coverage:
    """Which tiers hold each coordinate of every floating-point tensor, as bits; a class is named by its tiers.

    The server sees all coordinates (``of``), a client those of its own piece, in tensors of that size (``inside``). In
    both, the coordinates of a class follow each other in the same order.
    """

    tiers: Sequence[str]
    held: Mapping[str, Tensor]  # int64: bit n is set where tier n holds a coordinate

    @classmethod
    def of(
        cls, weights: Mapping[str, Tensor], pieces: Sequence[Piece], tiers: Sequence[str], model: ElasticModel
    ) -> Coverage:
        """Of a round in which each tier holds one piece."""
        names = sorted(
            {name for piece in pieces for name in piece.names if weights[name].is_floating_point()}
        )
        tables = [model.table(piece.cut) for piece in pieces]
        held = {}
        for name in names:
            bits = torch.zeros(weights[name].shape, dtype=torch.int64)
            for number, piece in enumerate(pieces):
                if name in piece.names:
                    own = torch.zeros_like(bits)
                    scatter(own, whole_or(tables[number].get(name), own), own.new_tensor(1 << number))
                    bits |= own
            held[name] = bits
        return cls(tiers, held)

    @classmethod
    def inside(
        cls,
        own: int,
        values: Mapping[str, Tensor],
        pieces: Sequence[Piece],
        tiers: Sequence[str],
        model: ElasticModel,
    ) -> Coverage:
        """Of the values that a client of this tier holds: no tensor is larger than these."""
        tables = [model.table(piece.cut) for piece in pieces]
        held = {}
        for name in sorted(name for name in pieces[own].names if values[name].is_floating_point()):
            value = values[name]
            full = tuple(value.shape) if is_tagged(name) else model.shape(name, Cut.everything())
            bits = torch.zeros(value.shape, dtype=torch.int64)
            for number, piece in enumerate(pieces):
                if name in piece.names:
                    places = [whole_or(tables[each].get(name), value) for each in (own, number)]
                    bits |= held_there(places[0], places[1], full).long() << number
            held[name] = bits
        return cls(tiers, held)

    @cached_property
    def classes(self) -> dict[str, int]:
        """Name and bits of every class; coordinates that nobody holds are in none."""
        found = sorted({int(each) for bits in self.held.values() for each in bits.unique()} - {0})
        return {self._name(bits): bits for bits in found}

    def _name(self, bits: int) -> str:
        return "+".join(tier for number, tier in enumerate(self.tiers) if bits >> number & 1)

    def members(self, bits: int) -> list[str]:
        """The tiers of a class."""
        return [tier for number, tier in enumerate(self.tiers) if bits >> number & 1]

    def rows(self, values: Mapping[str, Tensor], tier: str) -> dict[str, Row]:
        """Values as a row for each class of a tier: tensors by name, coordinates in their order."""
        place = list(self.tiers).index(tier)
        found = {}
        for label, bits in self.classes.items():
            if bits >> place & 1:
                parts = [values[name][where] for name, where in self._places(bits) if name in values]
                found[label] = torch.cat([part.double() for part in parts]).numpy()
        return found

    def _places(self, bits: int) -> list[tuple[str, Tensor]]:
        return [(name, held == bits) for name, held in self.held.items() if bool((held == bits).any())]

    def words(self, label: str) -> int:
        """How many words a row of a class has: its coordinates, and the weight."""
        bits = self.classes[label]
        return sum(int((held == bits).sum()) for held in self.held.values()) + 1

    def put_back(self, values: Mapping[str, Tensor], label: str, row: Row) -> None:
        """Add a row to full-size tensors, in place."""
        start = 0
        for name, where in self._places(self.classes[label]):
            count = int(where.sum())
            values[name][where] += torch.from_numpy(row[start : start + count])
            start += count


def held_there(own: Where, other: Where, full: Sequence[int]) -> Tensor:
    """Which coordinates at one place of a tensor lie at another too: true or false, in the shape of the former."""
    if isinstance(own, Survivors) or isinstance(other, Survivors):
        whole = torch.zeros(tuple(full), dtype=torch.bool)
        scatter(whole, other, torch.tensor(True))
        return gather(whole, own)
    found = torch.ones((), dtype=torch.bool)
    for mine, theirs, length in zip(own, other, full, strict=True):
        found = found.unsqueeze(-1) & _on_axis(mine, theirs, length)
    return found


def _on_axis(own: Index, other: Index, length: int) -> Tensor:
    kept = torch.zeros(length, dtype=torch.bool)
    kept[other] = True
    return kept[own]
