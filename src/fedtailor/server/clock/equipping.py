"""Which piece each tier of a table of devices is given: the largest that finishes in time and fits in memory.

A budget is a property of a device, the same for every method of a comparison: it is the plain piece, trained once over
the examples of a typical client. What a method does beyond that, or a client with more examples, is left to the round
(``timetable.assigned``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.budget import Budget, amount
from fedtailor.elasticity.costing.fitting import TooSmallError, distinct_widths
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import Fleet
from fedtailor.fleet.devices.table import Device
from fedtailor.fleet.devices.trips import PASSES, Load, Trip, trip
from fedtailor.method import Method


def equipped(fleet: Fleet, method: Method, model: ElasticModel, data: FederatedData) -> Fleet:
    """A fleet of devices with the budgets of its tiers, smallest first; others as they are."""
    equipment = fleet.equipment
    if equipment is None:
        return fleet
    widths, reasons = fitted_widths(fleet, method, model, data)
    counts = dict(zip((tier.name for tier in fleet.tiers), fleet.counts(data.num_clients), strict=True))
    if reasons and (fleet.too_small == "refuse" or not widths):
        name, reason = next(iter(reasons.items()))
        advice = '; fleet.too_small = "skip" goes on without such devices' if widths else ""
        clients = f"{counts[name]} client{'' if counts[name] == 1 else 's'}"
        raise TooSmallError(f"tier {name!r} ({clients}): {reason}{advice}") from reason
    order = sorted(range(len(fleet.tiers)), key=lambda n: widths.get(fleet.tiers[n].name, Fraction(0)))
    moved = np.empty(len(order), dtype=np.int32)
    moved[order] = np.arange(len(order), dtype=np.int32)
    budgets = {tier.name: Budget(width=widths.get(tier.name, 1)) for tier in fleet.tiers}
    sorted_fleet = replace(
        fleet,
        tiers=tuple(fleet.tiers[number] for number in order),
        equipment=replace(equipment, placed=moved[equipment.placed]),
    ).equipped(budgets)
    left_out = [tier for tier in sorted_fleet.tiers if tier.name in reasons]
    return sorted_fleet.without(left_out) if left_out else sorted_fleet


def fitted_widths(
    fleet: Fleet, method: Method, model: ElasticModel, data: FederatedData
) -> tuple[dict[str, Fraction], dict[str, TooSmallError]]:
    """The width of each tier of devices, and why others have none."""
    equipment = fleet.equipment
    assert equipment is not None
    widths, reasons = {}, {}
    for number, tier in enumerate(fleet.whole or fleet.tiers):
        weakest = equipment.weakest(number)
        try:
            widths[tier.name] = widest(model, method, weakest, typical(data), equipment.deadline)
        except TooSmallError as error:
            reasons[tier.name] = error
    return widths, reasons


def typical(data: FederatedData) -> int:
    """The examples of a typical client."""
    return int(np.median(data.sizes))


def widest(
    model: ElasticModel, method: Method, device: Device, examples: int, deadline: float = math.inf
) -> Fraction:
    """The largest width that a device can hold and finish; raises with the reason where there is none."""
    widths = distinct_widths(model.groups)
    low, high = -1, len(widths) - 1
    while low < high:  # both time and memory rise with the width
        middle = (low + high + 1) // 2
        fits = not _obstacle(model, method, device, widths[middle], examples, deadline)
        low, high = (middle, high) if fits else (low, middle - 1)
    if low < 0:
        reason = _obstacle(model, method, device, widths[0], examples, deadline)
        raise TooSmallError(f"even the smallest piece of the model {reason}")
    return widths[low]


def _obstacle(
    model: ElasticModel, method: Method, device: Device, width: Fraction, examples: int, deadline: float
) -> str:
    """Why a device cannot train a width; nothing where it can."""
    cut = prefix(model.groups, width, method.grid)
    if math.isfinite(device.memory):
        needed = model.cost(cut, method.workload).training_memory or 0
        if needed > device.memory:
            return f"takes {amount('memory', needed)} of {amount('memory', device.memory)} of memory to train"
    found = plain_trip(model, method.local, device, cut, examples)
    if found.seconds > deadline:
        parts = f"{found.down:.3g} s to get there, {found.compute:.3g} s of training, {found.up:.3g} s back"
        return f"takes {found.seconds:.3g} s of {deadline:.3g} s for {examples} examples: {parts}"
    return ""


def plain_trip(model: ElasticModel, local: LocalTraining, device: Device, cut: Cut, examples: int) -> Trip:
    """A piece sent, trained once over a client's examples, and sent back."""
    cost = model.cost(cut)
    macs = PASSES * cost.macs * local.examples_for(examples)
    return trip(device, Load(cost.bytes, cost.bytes, macs, local.steps_for(examples)))
