"""What a run had spent when it reached an accuracy: rounds, FLOPs and communicated parameters, as Flado's tables count.

Pure functions over the records of a run of any method. Devices of a range of budgets may be given different
networks; the figures are those of one tier, by default the last, which is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.record import Tiers, less_is_better
from fedtailor.report.targets import Records, last_evaluation, mean_over_tiers, spent_until

FLOPS_PER_MAC = 2
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Reached:
    """All that a run had cost up to an evaluation, training and measuring, and what it was worth."""

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


def course_of(records: Records, metric: str = "accuracy", tier: str | None = None) -> list[Reached]:
    """The course of a run: one entry per evaluation.

    >>> from fedtailor.record import RoundRecord, Spent
    >>> course_of([RoundRecord(1, training=Spent(8, 4, 10), tiers={"all": {"accuracy": 0.5}})])
    [Reached(round=1, macs=10, bytes=12, value=0.5)]
    """
    last_evaluation(records)  # a run without one is refused
    return _course(records, lambda tiers: _value(tiers, metric, tier))


def _course(records: Records, value: Callable[[Tiers], float]) -> list[Reached]:
    return [
        Reached(record.round, spent.macs, spent.bytes, value(record.tiers))
        for record, spent in zip(records, spent_until(records), strict=True)
        if record.tiers
    ]


def best(course: Sequence[Reached]) -> Reached:
    """The first evaluation with the highest value, and what it had cost."""
    return max(course, key=lambda reached: (reached.value, -reached.round))


def to_reach(course: Sequence[Reached], target: float) -> Reached | None:
    """What the run had cost when its value was first at least ``target``; None if it never was."""
    return next((reached for reached in course if reached.value >= target), None)


def to_match(course: Sequence[Reached], other: Sequence[Reached]) -> dict[str, float] | None:
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


def pareto(points: Mapping[str, Reached]) -> list[str]:
    """The runs that no other beats in FLOPs and communication at once, by rising FLOPs."""
    ordered = sorted(points, key=lambda name: (points[name].macs, points[name].bytes))
    front: list[str] = []
    for name in ordered:
        if not front or points[name].bytes < points[front[-1]].bytes:
            front.append(name)
    return front


def matching(results: Mapping[str, Sequence[Records]], metric: str = "accuracy") -> list[dict[str, Any]]:
    """Flado's table: methods by rising best value over seeds (method -> seed -> records), by the mean over tiers.

    ``more`` is what a method cost beyond the one before it in the table until it matched that one's best, paired in
    the order of seeds; None where a seed never did. Below zero is a saving.
    """
    sign = -1 if less_is_better(metric) else 1
    courses = {name: [_mean_course(run, metric, sign) for run in runs] for name, runs in results.items()}
    tops = {name: [best(course) for course in each] for name, each in courses.items() if all(each)}
    table: list[dict[str, Any]] = []
    for name in sorted(tops, key=lambda name: fmean(top.value for top in tops[name])):
        row = {"method": name, "best": sign * fmean(top.value for top in tops[name])}
        row |= _means([top.figures() for top in tops[name]], ("round", "flops", "parameters"))
        if table:
            before = table[-1]["method"]
            found = [to_match(*pair) for pair in zip(courses[name], courses[before], strict=False)]
            known = [each for each in found if each is not None]
            more = _means(known, ("rounds", "flops", "parameters")) if len(known) == len(found) else None
            row |= {"against": before, "more": more}
        table.append(row)
    return table


def _mean_course(records: Records, metric: str, sign: int) -> list[Reached]:
    """A run's course by the mean over tiers, so that more is better; evaluations that gave no number are left out."""
    course = _course(records, lambda tiers: sign * mean_over_tiers(tiers, metric))
    return [each for each in course if math.isfinite(each.value)]


def _means(figures: Sequence[Mapping[str, float]], keys: Sequence[str]) -> dict[str, float]:
    return {key: fmean(each[key] for each in figures) for key in keys}


def _value(tiers: Tiers, metric: str, tier: str | None) -> float:
    name = list(tiers)[-1] if tier is None else tier
    if name not in tiers or metric not in tiers[name]:
        known = ", ".join(tiers)
        raise FedtailorError(
            f"tier {name!r} has no {metric!r}: expected one of the tiers {known} and their metrics"
        )
    return float(tiers[name][metric])
