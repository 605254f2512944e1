"""A fleet at a glance, before anything is trained: who gets what, how long a round takes whom, who is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.fleet.devices.trips import Trip, trip
from fedtailor.messages import Client
from fedtailor.server.clock.equipping import fitted_widths, typical
from fedtailor.server.clock.timetable import load_of
from fedtailor.server.setup import Setup


@dataclass(frozen=True)
class TierView:
    """One tier: how many clients, which piece, and the way of a typical client's task on its weakest device."""

    name: str
    clients: int
    cut: Cut | None = None
    way: Trip | None = None  # of fleets of devices
    availability: float = 1.0
    reason: str = ""  # why it takes no part


def overview(setup: Setup) -> list[TierView]:
    """All tiers of a fleet, the smallest first; those that take no part at the end."""
    fleet, method, model = setup.fleet, setup.method, setup.model
    state, examples = method.begin(setup.start.state, model), typical(setup.data)
    counts = fleet.counts(setup.data.num_clients)
    views = []
    for tier, count in zip(fleet.tiers, counts, strict=True):
        client = Client(0, tier.name, tier.budget, examples)
        task = method.assign(state, client, model, setup.seeds)
        way, there = None, 1.0
        if fleet.equipment is not None:
            everyone = [each.name for each in fleet.whole or fleet.tiers]
            device = fleet.equipment.weakest(everyone.index(tier.name))
            way, there = trip(device, load_of(task, method, model)), device.availability
        views.append(TierView(tier.name, count, task.patch.cut, way, there))
    return views + _left_out(setup)


def _left_out(setup: Setup) -> list[TierView]:
    """Those whose devices can finish no piece, and those that the method has no piece for."""
    fleet, clients = setup.fleet, setup.data.num_clients
    counts = dict(zip((tier.name for tier in fleet.whole), fleet.counted(clients), strict=False))
    reasons: Mapping[str, object] = {}
    if fleet.left_out and fleet.equipment is not None:
        _, reasons = fitted_widths(fleet, setup.method, setup.model, setup.data)
    return [
        TierView(
            tier.name,
            counts[tier.name],
            reason=str(reasons.get(tier.name, f"{setup.method.name} trains nothing that fits {tier.budget}")),
        )
        for tier in fleet.left_out
    ]
