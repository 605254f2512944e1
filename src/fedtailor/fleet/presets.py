"""Fleets by name, as the papers write them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtailor.elasticity.costing.budget import LIMITS, Budget
from fedtailor.elasticity.cutting.selections import as_width
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet.devices.equipment import Equipment
from fedtailor.fleet.devices.grouping import tiers_of
from fedtailor.fleet.devices.quantities import seconds
from fedtailor.fleet.devices.reading import read_devices
from fedtailor.fleet.devices.traces import read_courses
from fedtailor.fleet.fleet import Fleet, Tier, TooSmall

HETEROFL_WIDTHS = {
    level: Fraction(1, 2**power) for power, level in enumerate("abcde")
}  # HeteroFL's computation levels
EVALUATED_SHARES = 5  # points at which a fleet with a range of budgets is evaluated


@dataclass(frozen=True)
class FleetSettings:
    """The fleet of a run."""

    name: str = "uniform-5"
    """A fleet by name: uniform-5, a1-b1-c1-d1-e1, flops-0.04-0.64, high, low, two-25-75, equal or full-5."""
    capacity: Literal["static", "dynamic"] = "static"
    """dynamic: every client's tier is redrawn in every round."""
    drop_scale: float | None = None
    """Of uniform-k: below 1, more devices are of the top tier."""
    tiers: list[dict[str, Any]] = field(default_factory=list)
    """Your own: name, share, and limits such as width or macs."""
    too_small: TooSmall = "refuse"
    """skip: go on without devices that no piece of the model fits."""
    devices: str | list[dict[str, Any]] = ""
    """A table of devices instead of a name: built-in, a .toml or .csv file, or rows; a simulated clock counts by it."""
    deadline: str | float | None = None
    """Of devices: how long a round may take, in simulated time, such as 60s; each is given what it can finish."""
    most_tiers: int = 8
    """Of devices: a longer table is grouped into so many tiers of devices that are alike."""
    trace: str = ""
    """Of devices: a .csv file that says when they are there and how busy (device, from, to, availability, load)."""

    def __post_init__(self) -> None:
        choices = ("static", "dynamic")
        require(self.capacity in choices, "fleet.capacity", self.capacity, "static or dynamic")
        require(self.too_small in ("refuse", "skip"), "fleet.too_small", self.too_small, "refuse or skip")
        require(self.most_tiers >= 1, "fleet.most_tiers", self.most_tiers, "at least 1")
        for name in () if self.devices else ("deadline", "trace"):
            value = getattr(self, name)
            require(not value, f"fleet.{name}", value, "a table of fleet.devices with it")
        if self.devices:
            require(not self.tiers, "fleet.tiers", self.tiers, "none beside fleet.devices, which makes them")
            static = self.capacity == "static"
            require(
                static,
                "fleet.capacity",
                self.capacity,
                "static: fleet.trace says when devices of a table change",
            )
        build_fleet(self)


def build_fleet(settings: FleetSettings) -> Fleet:
    """The fleet that the settings describe."""
    dynamic = settings.capacity == "dynamic"
    if settings.devices:
        return _of_devices(settings)
    if settings.tiers:
        own = tuple(_own_tier(number, table) for number, table in enumerate(settings.tiers))
        return Fleet(own, dynamic, too_small=settings.too_small)
    named = fleet_by_name(settings.name, dynamic=dynamic, drop_scale=settings.drop_scale)
    return replace(named, too_small=settings.too_small)


def _of_devices(settings: FleetSettings) -> Fleet:
    """Tiers of a table; their budgets are those of the full model until one knows which piece each can finish."""
    devices = read_devices(settings.devices)
    names, placed = tiers_of(devices, settings.most_tiers)
    deadline = math.inf if settings.deadline is None else seconds("fleet.deadline", settings.deadline)
    require(deadline > 0, "fleet.deadline", settings.deadline, "a time above 0, such as '60s'")
    courses = read_courses(Path(settings.trace), devices.names) if settings.trace else {}
    weights = np.bincount(placed, weights=devices.columns["share"], minlength=len(names))
    tiers = [
        Tier(name, Budget(width=1), Fraction(float(weight)))
        for name, weight in zip(names, weights, strict=True)
    ]
    equipment = Equipment(devices, placed, deadline, courses)
    return Fleet(tuple(tiers), too_small=settings.too_small, equipment=equipment)


def fleet_by_name(name: str, *, dynamic: bool = False, drop_scale: float | None = None) -> Fleet:
    """``uniform-5``, ``a1-b1-c1-d1-e1``, ``flops-0.04-0.64``, ``high``, ``low``, ``two-25-75``, ``equal``, ``full-5``.

    >>> [(tier.name, tier.share) for tier in fleet_by_name("a1-e3").tiers]
    [('e', Fraction(3, 4)), ('a', Fraction(1, 4))]
    """
    if drop_scale is not None and not name.startswith("uniform-"):
        raise FedtailorError(
            f"fleet.drop_scale = {drop_scale!r}: only uniform-k fleets have one, not {name!r}"
        )
    for pattern, build in PATTERNS.items():
        found = re.fullmatch(pattern, name)
        if found:
            tiers, macs_range = build(found, drop_scale)
            return Fleet(tuple(tiers), dynamic, macs_range, only_top=build is _full)
    raise unknown("fleet", name, fleet_examples(), hint=" (numbers and letters are yours to change)")


Built = tuple[list[Tier], tuple[Fraction, Fraction] | None]


def _uniform(found: re.Match[str], drop_scale: float | None) -> Built:
    """Widths 1/k ... 1. Drop scale ds: each of the lower tiers holds ds/k of the clients, the top tier the rest."""
    count = int(found[1])
    require(count >= 1, "fleet.name", found[0], "at least one tier, such as uniform-5")
    scale = Fraction(1) if drop_scale is None else as_width(drop_scale, "fleet.drop_scale")
    shares = [scale / count] * (count - 1) + [1 - (count - 1) * scale / count]
    widths = [Fraction(number, count) for number in range(1, count + 1)]
    return [
        Tier(_decimal(width), Budget(width=width), share) for width, share in zip(widths, shares, strict=True)
    ], None


def _levels(found: re.Match[str], _drop_scale: float | None) -> Built:
    """HeteroFL's mixes: ``a1-b1-c1-d1-e1`` is a fifth of the clients each, ``a1-e9`` one in ten at level a."""
    parts = dict(re.findall(r"([a-z])(\d+)", found[0]))
    wrong = sorted(set(parts) - set(HETEROFL_WIDTHS))
    if wrong or len(parts) != len(found[0].split("-")):
        level = wrong[0] if wrong else found[0]
        raise FedtailorError(
            f"fleet.name = {found[0]!r}: level {level!r} is none of {', '.join(HETEROFL_WIDTHS)}, each at most once"
        )
    counts = {level: int(number) for level, number in parts.items()}
    require(all(counts.values()), "fleet.name", found[0], "a number above 0 behind each level")
    total = sum(counts.values())
    ordered = sorted(counts, key=lambda level: HETEROFL_WIDTHS[level])
    return [
        Tier(level, Budget(width=HETEROFL_WIDTHS[level]), Fraction(counts[level], total)) for level in ordered
    ], None


def _flops(found: re.Match[str], _drop_scale: float | None) -> Built:
    """Every client's FLOPs limit is uniform in a range (Flado: U(0.04, 0.64) of the full model)."""
    low, high = as_width(found[1], "fleet.name"), as_width(found[2], "fleet.name")
    require(low <= high, "fleet.name", found[0], "the smaller share first")
    count = EVALUATED_SHARES if low < high else 1
    points = [low + (high - low) * Fraction(step, max(1, count - 1)) for step in range(count)]
    tiers = [Tier(f"{float(point):.3g} flops", Budget(macs=point), Fraction(1, count)) for point in points]
    return tiers, (low, high)


def _capacity(found: re.Match[str], _drop_scale: float | None) -> Built:
    """APFL's fleets: 50/30/20 % (high) or 20/30/50 % (low) of devices for widths 1, 0.75 and 0.5."""
    shares = (20, 30, 50) if found[0] == "high" else (50, 30, 20)
    widths = (Fraction(1, 2), Fraction(3, 4), Fraction(1))
    pairs = zip(widths, shares, strict=True)
    return [Tier(_decimal(width), Budget(width=width), Fraction(share, 100)) for width, share in pairs], None


def _two_types(found: re.Match[str], _drop_scale: float | None) -> Built:
    """FLANC's imbalanced fleets: so many per cent of full devices, so many of a quarter of the width."""
    large, small = int(found[1]), int(found[2])
    require(
        large > 0 and small > 0 and large + small == 100,
        "fleet.name",
        found[0],
        "two percentages that add to 100",
    )
    quarter = Tier("0.25", Budget(width=Fraction(1, 4)), Fraction(small, 100))
    return [quarter, Tier("1", Budget(width=1), Fraction(large, 100))], None


def _equal(found: re.Match[str], _drop_scale: float | None) -> Built:
    """Every device can train the same width."""
    width = as_width(found[1], "fleet.name") if found[1] else Fraction(1)
    return [Tier(_decimal(width), Budget(width=width), Fraction(1))], None


def _full(found: re.Match[str], _drop_scale: float | None) -> Built:
    """Every device can train the full model, which is evaluated at the widths 1/k ... 1."""
    return _uniform(found, None)


PATTERNS: dict[str, Callable[[re.Match[str], float | None], Built]] = {
    r"uniform-(\d+)": _uniform,
    r"[a-z]\d+(?:-[a-z]\d+)*": _levels,
    r"flops-([\d.]+)-([\d.]+)": _flops,
    r"high|low": _capacity,
    r"two-(\d+)-(\d+)": _two_types,
    r"equal(?:-([\d./]+))?": _equal,
    r"full-(\d+)": _full,
}


def fleet_examples() -> list[str]:
    """One name of every kind."""
    return ["uniform-5", "a1-b1-c1-d1-e1", "flops-0.04-0.64", "high", "low", "two-25-75", "equal", "full-5"]


def _own_tier(number: int, table: dict[str, Any]) -> Tier:
    known = ("name", "share", *LIMITS)
    for key in table:
        if key not in known:
            raise unknown(f"key of fleet.tiers[{number}]", key, known)
    budget = Budget(**{key: table[key] for key in known[2:] if key in table})
    require(bool(budget.limits), f"fleet.tiers[{number}]", table, f"at least one of {', '.join(LIMITS)}")
    return Tier(str(table.get("name", f"tier {number}")), budget, _share(table.get("share", 1), number))


def _share(value: Any, number: int) -> Fraction:
    try:
        share = Fraction(0) if isinstance(value, bool) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    require(share > 0, f"fleet.tiers[{number}].share", value, "a number above 0")
    return share


def _decimal(width: Fraction) -> str:
    """0.2 where that is exact, 1/3 where it is not."""
    text = f"{float(width):.6g}"
    return text if Fraction(text) == width else str(width)
