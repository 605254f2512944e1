"""How a client's probabilities move: along what it has come to know of the slope, at the cost that its budget allows.

Symbols: p = probabilities, one per unit; F(p) = expected multiply-accumulates. An estimate of the slope is mostly
noise, and units whose gradients are large have most of it. So a unit moves by Adam's rule (Kingma, Ba, ICLR 2015): as
far as its estimates agree with each other, not as far as the largest of them reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtailor.elasticity.costing.expected import expected_macs
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel

CLIENTS, TABLE = "clients", "probabilities/"  # names of tables about a finished run
MEAN, SQUARE, ESTIMATES = (
    "mean slope",
    "mean squared slope",
    "estimates",
)  # what a client remembers of the slope
SLOW = 0.99  # how much of the squared slope stays when a new estimate comes in, Adam's second beta
ASIDE = 1e-4  # by which a probability is moved to see what it costs


@dataclass(frozen=True)
class Known:
    """What a client has come to know of the slope of every unit: running means of it and of its square, as Adam's."""

    mean: Vector
    square: Vector
    estimates: float  # that went in

    @classmethod
    def of(cls, memory: Mapping[str, Tensor], units: int) -> Known:
        """What a client's memory says; nothing at first."""
        if MEAN not in memory:
            return cls(np.zeros(units), np.zeros(units), 0)
        return cls(memory[MEAN].numpy(), memory[SQUARE].numpy(), float(memory[ESTIMATES]))

    def joined(self, slope: Vector, persistence: float) -> Known:
        """With one more estimate."""
        return Known(
            persistence * self.mean + (1 - persistence) * slope,
            SLOW * self.square + (1 - SLOW) * slope**2,
            self.estimates + 1,
        )

    def direction(self, persistence: float) -> Vector:
        """The mean slope of every unit over its usual size: about 1 where all estimates agree, near 0 where none do."""
        mean = self.mean / (1 - persistence**self.estimates)
        size = np.sqrt(self.square / (1 - SLOW**self.estimates))
        return np.asarray(np.divide(mean, size, out=np.zeros_like(mean), where=size > 0))

    @property
    def memory(self) -> dict[str, Tensor]:
        """As a client keeps it."""
        estimates = torch.tensor(self.estimates, dtype=torch.float64)
        return {
            MEAN: torch.from_numpy(self.mean),
            SQUARE: torch.from_numpy(self.square),
            ESTIMATES: estimates,
        }


def free_of_cost(direction: Vector, p: Vector, model: ElasticModel) -> Vector:
    """The part of a direction along which the cost stays, to first order."""
    price = prices(p, model)
    square = float(price @ price)
    return direction - price * (float(direction @ price) / square if square > 0 else 0.0)


def prices(p: Vector, model: ElasticModel) -> Vector:
    """dF/dp: what a little more of each unit costs; the same for all units of a group, but for rounding."""
    found, groups = np.zeros(len(p)), model.units.by_group(p)
    for group, part in model.units.slices.items():
        above, below = (
            expected_macs(model.costs, {**groups, group: groups[group] + sign * ASIDE}) for sign in (1, -1)
        )
        found[part] = (above - below) / (2 * ASIDE * len(groups[group]))
    return found


def tables_of(kept: Mapping[int, Tensor], model: ElasticModel) -> dict[str, Tensor]:
    """Clients' probabilities, for a report: their ids, and a table (clients, units) for each group."""
    if not kept:
        return {}
    rows = torch.stack(list(kept.values()))
    tables = {f"{TABLE}{group}": rows[:, part].contiguous() for group, part in model.units.slices.items()}
    return {CLIENTS: torch.tensor(list(kept)), **tables}
