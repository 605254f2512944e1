"""Architectures as numbers of units of each channel group: as a cut, as a client reports one, as a report shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import absolute_limits
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import require, unknown
from fedtailor.messages import Update

UNITS = "units of "  # what precedes a group's name in the answer of a search


def architecture(counts: Mapping[str, int], model: ElasticModel) -> Cut:
    """The cut that keeps so many units of each group; a group that is not named is kept whole."""
    for group, units in counts.items():
        if group not in model.groups.elastic:
            raise unknown("channel group", group, model.groups.elastic)
        full = model.groups.counts[group]
        require(1 <= units <= full, f"units of group {group}", units, f"1 to {full}")
    return Cut.of(model.groups, {group: range(units) for group, units in counts.items()})


def reported_units(counts: Sequence[int], model: ElasticModel) -> dict[str, float]:
    """An architecture as metrics of an update."""
    return {f"{UNITS}{group}": float(n) for group, n in zip(model.groups.elastic, counts, strict=True)}


def found_architecture(update: Update, model: ElasticModel) -> dict[str, int]:
    """What a client says it found; nothing where that is no architecture, so that it will keep a uniform width."""
    said = {n.removeprefix(UNITS): v for n, v in update.metrics.items() if n.startswith(UNITS)}
    full = {group: model.groups.counts[group] for group in model.groups.elastic}
    sound = said.keys() == full.keys() and all(v == int(v) and 1 <= v <= full[g] for g, v in said.items())
    return {group: int(units) for group, units in said.items()} if sound else {}


def described(counts: Mapping[str, int], model: ElasticModel) -> dict[str, Any]:
    """What an architecture costs, and the share of units that it keeps of every channel group."""
    cost, full = model.cost(architecture(counts, model)), model.groups.counts
    kept = {group: round(units / full[group], 4) for group, units in counts.items()}
    return {"macs": cost.macs, "params": cost.params, "kept": kept}


def can_run_all(budget: Budget, model: ElasticModel) -> bool:
    """Whether a budget pays for the full network."""
    limits = {name: limit for name, limit in budget.limits.items() if limit != 1}
    everything = Budget(macs=1, params=1, bytes=1)
    full = model.once(("full limits",), lambda: absolute_limits(model.costs, everything))  # every client asks
    return all(name in full and limit >= full[name] for name, limit in limits.items())
