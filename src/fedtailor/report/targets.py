"""What a method had to spend until it was as good as a target: rounds, bytes sent, multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from fedtailor.charts.grouping import percent
from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, Spent, Tiers, less_is_better

Records = Sequence[RoundRecord]  # of one run, round by round
Results = Mapping[str, Sequence[Records]]  # method -> seed -> records

REACHED = (
    "A method reaches a target at the first evaluation at which its mean over tiers and seeds is as good; "
    "one whose mean is worse at the end has not reached it."
)
USUAL_TARGET = (
    "Unless a target is given, it is the hardest whole per cent that more than half of several methods reach; "
    "there is none within a tenth of the way from guessing (always the commonest class) to 100 %."
)
NEAR_GUESSING = 0.1  # of the way from guessing to all right


def last_evaluation(records: Records) -> Tiers:
    """What every tier scored when it was last asked."""
    for record in reversed(records):
        if record.tiers:
            return record.tiers
    raise FedtailorError("no round of this run has an evaluation: nothing can be said about its accuracy")


def mean_over_tiers(tiers: Tiers, metric: str) -> float:
    """One number for an evaluation: every class of device counts the same."""
    values = [scores[metric] for scores in tiers.values()]
    return float(sum(values) / len(values))


def spent_until(records: Records) -> list[Spent]:
    """What training and measuring had cost after each round, in all.

    >>> spent_until([RoundRecord(n, training=Spent(5, 3, 7), measuring=Spent(1, 0, 2)) for n in (1, 2)])[-1]
    Spent(bytes_down=12, bytes_up=6, macs=18)
    """
    return list(accumulate(record.spent for record in records))


def is_simulated(records: Records) -> bool:
    """Whether a run knows how long its rounds took on the devices."""
    return bool(records) and all(record.simulated is not None for record in records)


def simulated_until(records: Records) -> list[float]:
    """Simulated seconds after each round; 0 where there is no clock."""
    return list(accumulate(record.simulated.seconds if record.simulated else 0.0 for record in records))


def cost_to_reach(seeds: Sequence[Records], target: float, metric: str) -> dict[str, float] | None:
    """What one seed had spent, in the mean, when the method reached the target; None if it has not (``REACHED``).

    Between evaluations nothing is known, so the answer is late by up to ``evaluate_every`` rounds, never early.
    """
    sign = -1 if less_is_better(metric) else 1
    course = list(mean_course(seeds, metric))
    good = [cost for score, cost in course if sign * (score - target) >= 0]
    if not course or not sign * (course[-1][0] - target) >= 0:  # also where it is not a number
        return None
    return good[0]


def mean_course(seeds: Sequence[Records], metric: str) -> Iterator[tuple[float, dict[str, float]]]:
    """Mean score and cost over seeds at every evaluation, once each seed has one; a seed that has ended stays so."""
    found = [
        {
            record.round: (record.round, mean_over_tiers(record.tiers, metric), spent, time)
            for record, spent, time in zip(
                records, spent_until(records), simulated_until(records), strict=True
            )
            if record.tiers
        }
        for records in seeds
    ]
    last: dict[int, tuple[int, float, Spent, float]] = {}
    timed = all(map(is_simulated, seeds))
    for round in sorted({round for evaluations in found for round in evaluations}):
        last |= {seed: evaluations[round] for seed, evaluations in enumerate(found) if round in evaluations}
        if len(last) == len(found):
            rounds, scores, spent, times = zip(*last.values(), strict=True)
            cost = {"rounds": fmean(rounds), "bytes": fmean(each.bytes for each in spent)}
            cost |= {"macs": fmean(each.macs for each in spent)}
            yield fmean(scores), {**cost, **({"simulated_seconds": fmean(times)} if timed else {})}


def guessing(setup: Mapping[str, Any]) -> float | None:
    """The accuracy of who always answers the commonest class, from a run's ``setup.json``; None without classes.

    >>> guessing({"data": {"rows": [{"label_counts": [3, 1]}, {"label_counts": [3, 1]}]}})
    0.75
    >>> guessing({"data": {"label_counts": [6, 2]}})
    0.75
    """
    data = setup.get("data", {})
    rows = [row.get("label_counts") or () for row in data.get("rows", ())]
    counts = data.get("label_counts") or [sum(each) for each in zip(*rows, strict=False)]
    return max(counts) / sum(counts) if sum(counts) else None


def lowest_target(metric: str, guess: float | None) -> float:
    """What a target must be better than to mean something."""
    known = guess is not None and metric == "accuracy"
    return guess + NEAR_GUESSING * (1 - guess) if known and guess is not None else -math.inf


def why_no_target(results: Results, metric: str, guess: float | None) -> str:
    """Why methods have no common target, in a sentence; nothing for a method that stands alone."""
    if len(results) < 2:
        return ""
    least = lowest_target(metric, guess)
    reason = "fewer than half of the methods ended with a number"
    if guess is not None and math.isfinite(least):
        reason = (
            f"at least half of the methods are below {100 * least:.0f} %, too near to the {100 * guess:.0f} % of "
            "guessing"
        )
    return f"No target: {reason}. --target X (target=X) sets one."


def common_target(results: Results, metric: str, guess: float | None = None) -> float | None:
    """The hardest whole per cent (or three digits, for other metrics) that more than half of the methods reach.

    Not all of them: a single method that fails would make the target worthless for the others. None that is hardly
    better than to ``guess``.
    """
    sign = -1 if less_is_better(metric) else 1
    ends = [[score for score, _ in mean_course(seeds, metric)][-1:] for seeds in results.values()]
    best = sorted(
        (sign * end[0] if end and math.isfinite(end[0]) else -math.inf for end in ends), reverse=True
    )
    reached = best[len(best) // 2] if best else -math.inf
    if not math.isfinite(reached):
        return None
    digits = 2 if percent(metric) > 1 else 3
    target = float(sign * math.floor(round(reached * 10**digits, 9)) / 10**digits)
    return target if target >= lowest_target(metric, guess) else None
