"""What a run had spent when it reached an accuracy: rounds, FLOPs and communicated parameters, as Flado's tables count.

Pure functions over the records of a run of any method. Devices of a range of budgets may be given different
networks; the figures are those of one tier, by default the last, which is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.record import Tiers, less_is_better
from fedtailor.report.targets import Records, last_evaluation, mean_course, spent_until

FLOPS_PER_MAC = 2
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Reached:
    """All that a run, or the mean of several, had cost up to an evaluation, and what it was worth."""

    round: float
    macs: float
    bytes: float  # down and up together
    value: float  # of the metric

    @property
    def flops(self) -> float:
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
    return [
        Reached(record.round, spent.macs, spent.bytes, _value(record.tiers, metric, tier))
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
    """Flado's table: methods by rising best value (method -> seed -> records), by the mean over tiers and seeds.

    ``more`` is what a method cost beyond the one before it in the table until its mean matched the best mean of that
    one, which it has done since the table rises. Below zero is a saving.
    """
    sign = -1 if less_is_better(metric) else 1
    courses = {name: _rising(seeds, metric, sign) for name, seeds in results.items()}
    tops = {name: best(course) for name, course in courses.items() if course}
    table: list[dict[str, Any]] = []
    for name in sorted(tops, key=lambda name: tops[name].value):
        figures = tops[name].figures()
        row = {"method": name, "best": sign * tops[name].value}
        row |= {key: figures[key] for key in ("round", "flops", "parameters")}
        if table:
            before = table[-1]["method"]
            row |= {"against": before, "more": to_match(courses[name], courses[before])}
        table.append(row)
    return table


def _rising(seeds: Sequence[Records], metric: str, sign: int) -> list[Reached]:
    """A method's course by the mean, so that more is better; evaluations that gave no number are left out."""
    course = (
        Reached(cost["rounds"], cost["macs"], cost["bytes"], sign * score)
        for score, cost in mean_course(seeds, metric)
    )
    return [each for each in course if math.isfinite(each.value)]


def _value(tiers: Tiers, metric: str, tier: str | None) -> float:
    name = list(tiers)[-1] if tier is None else tier
    if name not in tiers or metric not in tiers[name]:
        known = ", ".join(tiers)
        raise FedtailorError(
            f"tier {name!r} has no {metric!r}: expected one of the tiers {known} and their metrics"
        )
    return float(tiers[name][metric])
