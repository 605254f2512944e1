"""What a run had to spend until it was as good as a target: rounds, bytes sent, multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.record import less_is_better

Row = Mapping[str, Any]
COSTS = ("bytes", "macs")  # what ``spent`` adds up beside rounds


def metric_of(rows: Sequence[Row]) -> str:
    """What a run is judged by: its first metric that is not the loss.

    >>> metric_of([{"round": 1}, {"round": 2, "tiers": {"0.5": {"loss": 1.2, "accuracy": 0.6}}}])
    'accuracy'
    """
    scores = next((next(iter(row["tiers"].values())) for row in rows if row.get("tiers")), {"loss": 0.0})
    return next((name for name in scores if name != "loss"), "loss")


def mean_over_tiers(row: Row, metric: str) -> float:
    """One number for an evaluated round: every class of device counts the same."""
    values = [scores[metric] for scores in row["tiers"].values()]
    return float(sum(values) / len(values))


def spent(rows: Sequence[Row]) -> list[dict[str, float]]:
    """What had been spent after each round, in total: rounds, bytes down and up, multiply-accumulates.

    >>> spent([{"round": n, "bytes_down": 5, "bytes_up": 3, "macs": 7} for n in (1, 2)])
    [{'rounds': 1, 'bytes': 8, 'macs': 7}, {'rounds': 2, 'bytes': 16, 'macs': 14}]
    """
    totals, sent, macs = [], 0, 0
    for row in rows:
        sent += row["bytes_down"] + row["bytes_up"]
        macs += row["macs"]
        totals.append({"rounds": row["round"], "bytes": sent, "macs": macs})
    return totals


def cost_to_reach(rows: Sequence[Row], target: float, metric: str | None = None) -> dict[str, float] | None:
    """What had been spent at the first evaluation that is as good as the target; None if there is none.

    Between evaluations nothing is known, so the answer is late by up to ``evaluate_every`` rounds, never early.
    """
    name = metric or metric_of(rows)
    sign = -1 if less_is_better(name) else 1
    for row, total in zip(rows, spent(rows), strict=True):
        if row.get("tiers") and sign * (mean_over_tiers(row, name) - target) >= 0:
            return total
    return None


def common_target(results: Sequence[Sequence[Row]], metric: str) -> float | None:
    """The hardest whole per cent (or three digits, for other metrics) that three quarters of these runs reached.

    Not all of them: a single run that fails would make the target worthless for the others.
    """
    sign = -1 if less_is_better(metric) else 1
    scores = ([sign * mean_over_tiers(row, metric) for row in rows if row.get("tiers")] for rows in results)
    best = sorted((max(filter(math.isfinite, each), default=-math.inf) for each in scores), reverse=True)
    reached = best[math.ceil(len(best) * 3 / 4) - 1] if best else -math.inf
    if not math.isfinite(reached):
        return None
    digits = 2 if metric == "accuracy" else 3
    return float(sign * math.floor(round(reached * 10**digits, 9)) / 10**digits)
