"""What a run had to spend until it was as good as a target: rounds, bytes sent, multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from fedtailor.charts.grouping import percent
from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, Spent, Tiers, less_is_better

Records = Sequence[RoundRecord]  # of one run, round by round


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


def cost_to_reach(records: Records, target: float, metric: str) -> dict[str, float] | None:
    """What had been spent at the first evaluation that is as good as the target; None if there is none.

    Between evaluations nothing is known, so the answer is late by up to ``evaluate_every`` rounds, never early.
    """
    sign = -1 if less_is_better(metric) else 1
    for record, spent in zip(records, spent_until(records), strict=True):
        if record.tiers and sign * (mean_over_tiers(record.tiers, metric) - target) >= 0:
            return {"rounds": record.round, "bytes": spent.bytes, "macs": spent.macs}
    return None


def common_target(runs: Sequence[Records], metric: str) -> float | None:
    """The hardest whole per cent (or three digits, for other metrics) that three quarters of these runs reached.

    Not all of them: a single run that fails would make the target worthless for the others.
    """
    sign = -1 if less_is_better(metric) else 1
    scores = (
        [sign * mean_over_tiers(record.tiers, metric) for record in records if record.tiers]
        for records in runs
    )
    best = sorted((max(filter(math.isfinite, each), default=-math.inf) for each in scores), reverse=True)
    reached = best[math.ceil(len(best) * 3 / 4) - 1] if best else -math.inf
    if not math.isfinite(reached):
        return None
    digits = 2 if percent(metric) > 1 else 3
    return float(sign * math.floor(round(reached * 10**digits, 9)) / 10**digits)
