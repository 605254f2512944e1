"""Classes of coordinates: those that the same tiers hold. A client's update as one row of numbers for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.elasticity.cutting.patch import scatter
from fedtailor.elasticity.model import ElasticModel
from fedtailor.privacy.sums import Piece, whole_or

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Coverage:
    """Which tiers hold each coordinate of every floating-point tensor, as bits; a class is named by its tiers."""

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

    @property
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
        """Full-size values as a row for each class of a tier: tensors by name, coordinates in their order."""
        place = list(self.tiers).index(tier)
        found = {}
        for label, bits in self.classes.items():
            if bits >> place & 1:
                parts = [values[name][where] for name, where in self._places(bits) if name in values]
                found[label] = torch.cat([part.double() for part in parts]).numpy()
        return found

    def _places(self, bits: int) -> list[tuple[str, Tensor]]:
        return [(name, held == bits) for name, held in self.held.items() if bool((held == bits).any())]

    def put_back(self, values: Mapping[str, Tensor], label: str, row: Row) -> None:
        """Add a row to full-size tensors, in place."""
        start = 0
        for name, where in self._places(self.classes[label]):
            count = int(where.sum())
            values[name][where] += torch.from_numpy(row[start : start + count])
            start += count


def at_full_size(
    steps: Mapping[str, Tensor], weights: Mapping[str, Tensor], table: Mapping[str, object]
) -> dict[str, Tensor]:
    """A client's differences at their places in tensors of full size; zero elsewhere."""
    found = {}
    for name, step in steps.items():
        full = torch.zeros(weights[name].shape, dtype=torch.float64)
        scatter(full, whole_or(table.get(name), full), step)  # type: ignore[arg-type]
        found[name] = full
    return found
