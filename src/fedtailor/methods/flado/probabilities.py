"""How a client's probabilities move: along what it has come to know of the slope, at the cost that its budget allows.

Symbols: p = probabilities, one per unit; F(p) = expected multiply-accumulates.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedtailor.elasticity.costing.expected import expected_macs
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel

CLIENTS, TABLE = "clients", "probabilities/"  # names of tables about a finished run
ASIDE = 1e-4  # by which a probability is moved to see what it costs


def remembered(known: Vector | None, fresh: Vector, persistence: float) -> Vector:
    """A running mean of slopes, each at length one in the largest unit: rounds whose cosine is steep count no more."""
    steepest = float(np.abs(fresh).max(initial=0))
    unit = fresh / steepest if steepest > 0 else fresh
    return unit if known is None else persistence * known + (1 - persistence) * unit


def stepped(p: Vector, slope: Vector, largest: float, smallest_p: float, model: ElasticModel) -> Vector:
    """p moved by at most ``largest`` in any unit, along the part of the slope that costs nothing to first order."""
    price = prices(p, model)
    along = slope - price * _share(slope, price)
    steepest = float(np.abs(along).max(initial=0))
    if steepest == 0:
        return p
    return np.clip(p + largest * along / steepest, smallest_p, 1)


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


def _share(vector: Vector, of: Vector) -> float:
    square = float(of @ of)
    return float(vector @ of) / square if square > 0 else 0.0
