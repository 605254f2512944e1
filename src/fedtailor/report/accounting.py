"""What a run had spent when it reached an accuracy: rounds, FLOPs and communicated parameters, as Flado's tables count.

Pure functions over the rows of ``metrics.jsonl`` of any method. Devices of a range of budgets may be given different
networks; the figures are those of one tier, by default the last, which is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.record import less_is_better
from fedtailor.report.targets import Row, mean_over_tiers, spent

FLOPS_PER_MAC = 2
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Spent:
    """All that a run had cost up to an evaluation, and what it was worth."""

    round: int
    macs: int
    bytes: int  # down and up together
    value: float  # of the metric

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each multiply-accumulate."""
        return FLOPS_PER_MAC * self.macs

    @property
    def parameters(self) -> float:
        """Communicated numbers, as float32."""
        return self.bytes / BYTES_PER_PARAMETER

    def figures(self) -> dict[str, float]:
        """As plain data."""
        return {
            "round": self.round,
            "value": self.value,
            "flops": self.flops,
            "parameters": self.parameters,
            "bytes": self.bytes,
        }


def spending(rows: Sequence[Row], metric: str = "accuracy", tier: str | None = None) -> list[Spent]:
    """The course of a run: one entry per evaluation.

    >>> row = {"round": 1, "macs": 10, "bytes_down": 8, "bytes_up": 4, "tiers": {"all": {"accuracy": 0.5}}}
    >>> spending([row])
    [Spent(round=1, macs=10, bytes=12, value=0.5)]
    """
    course = _course(rows, lambda row: _value(row["tiers"], metric, tier))
    if not course:
        raise FedtailorError("no row of this run has an evaluation: nothing can be said about its accuracy")
    return course


def _course(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Spent]:
    return [
        Spent(row["round"], int(total["macs"]), int(total["bytes"]), value(row))
        for row, total in zip(rows, spent(rows), strict=True)
        if row.get("tiers")
    ]


def best(course: Sequence[Spent]) -> Spent:
    """The first evaluation with the highest value, and what it had cost."""
    return max(course, key=lambda spent: (spent.value, -spent.round))


def to_reach(course: Sequence[Spent], target: float) -> Spent | None:
    """What the run had cost when its value was first at least ``target``; None if it never was."""
    return next((spent for spent in course if spent.value >= target), None)


def to_match(course: Sequence[Spent], other: Sequence[Spent]) -> dict[str, float] | None:
    """What more than the other run this one cost to match the other's best value: below zero is a saving.

    None if it never does.
    """
    aim = best(other)
    reached = to_reach(course, aim.value)
    if reached is None:
        return None
    return {
        "rounds": reached.round - aim.round,
        "flops": reached.flops - aim.flops,
        "parameters": reached.parameters - aim.parameters,
        "bytes": reached.bytes - aim.bytes,
    }


def pareto(points: Mapping[str, Spent]) -> list[str]:
    """The runs that no other beats in FLOPs and communication at once, by rising FLOPs."""
    ordered = sorted(points, key=lambda name: (points[name].macs, points[name].bytes))
    front: list[str] = []
    for name in ordered:
        if not front or points[name].bytes < points[front[-1]].bytes:
            front.append(name)
    return front


def target_table(
    runs: Mapping[str, Sequence[Row]],
    allowances: Sequence[float] = (0.05, 0.1),
    metric: str = "accuracy",
    tier: str | None = None,
) -> list[dict[str, Any]]:
    """Flado's table: methods by rising best value, each against the one before; and the cost of common targets.

    A target is the best value of all methods less an allowance.
    """
    return table_of({name: spending(rows, metric, tier) for name, rows in runs.items()}, allowances)


def table_of(courses: Mapping[str, Sequence[Spent]], allowances: Sequence[float]) -> list[dict[str, Any]]:
    """The same for courses that are known."""
    order = sorted(courses, key=lambda name: best(courses[name]).value)
    top = best(courses[order[-1]]).value
    table = []
    for place, name in enumerate(order):
        reached = {f"{top - a:.4g}": to_reach(courses[name], top - a) for a in allowances}
        table.append(
            {
                "method": name,
                "best": best(courses[name]).figures(),
                "against": order[place - 1] if place else None,
                "difference": to_match(courses[name], courses[order[place - 1]]) if place else None,
                "targets": {target: each.figures() if each else None for target, each in reached.items()},
            }
        )
    return table


def matching(
    results: Mapping[str, Sequence[Sequence[Row]]], metric: str = "accuracy"
) -> list[dict[str, Any]]:
    """The same over seeds, for method -> seed -> rows, by the mean over tiers.

    ``more`` is what a method cost beyond the one before it in the table until it matched that one's best, paired in
    the order of seeds; None where a seed never did. Below zero is a saving.
    """
    sign = -1 if less_is_better(metric) else 1
    courses = {name: [_mean_course(rows, metric, sign) for rows in runs] for name, runs in results.items()}
    tops = {name: [best(course) for course in each] for name, each in courses.items() if all(each)}
    table: list[dict[str, Any]] = []
    for name in sorted(tops, key=lambda name: fmean(top.value for top in tops[name])):
        record = {"method": name, "best": sign * fmean(top.value for top in tops[name])}
        record |= _means([top.figures() for top in tops[name]], ("round", "flops", "parameters"))
        if table:
            before = table[-1]["method"]
            found = [to_match(*pair) for pair in zip(courses[name], courses[before], strict=False)]
            known = [each for each in found if each is not None]
            more = _means(known, ("rounds", "flops", "parameters")) if len(known) == len(found) else None
            record |= {"against": before, "more": more}
        table.append(record)
    return table


def _mean_course(rows: Sequence[Row], metric: str, sign: int) -> list[Spent]:
    """A run's course by the mean over tiers, so that more is better; evaluations that gave no number are left out."""
    course = _course(rows, lambda row: sign * mean_over_tiers(row, metric))
    return [each for each in course if math.isfinite(each.value)]


def _means(figures: Sequence[Mapping[str, float]], keys: Sequence[str]) -> dict[str, float]:
    return {key: fmean(each[key] for each in figures) for key in keys}


def _value(tiers: Mapping[str, Mapping[str, float]], metric: str, tier: str | None) -> float:
    name = list(tiers)[-1] if tier is None else tier
    if name not in tiers or metric not in tiers[name]:
        known = ", ".join(tiers)
        raise FedtailorError(
            f"tier {name!r} has no {metric!r}: expected one of the tiers {known} and their metrics"
        )
    return float(tiers[name][metric])
