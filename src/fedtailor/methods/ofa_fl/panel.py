"""OFA-FL's pruning events, for a report."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.charts.grouping import judged_by, named, percent, round_to
from fedtailor.charts.panel import ROUNDS, Chart, Panel, ReportedRun, axis, lines, panel


@panel("ofa-fl")
def drop_and_recovery(runs: Sequence[ReportedRun]) -> Panel | None:
    """The paper's figure 4: accuracy falls at every pruning event and comes back."""
    metric = judged_by(runs)
    if metric is None:
        return None
    rows = [
        {
            "method": run.variant,
            "rounds": record.round,
            "tier": tier,
            "networks": len(record.method.get("supported", ())),
            "score": round_to(percent(metric) * scores[metric]),
        }
        for run in {run.variant: run for run in reversed(runs)}.values()  # one seed of each variant
        for record in run.records
        for tier, scores in (record.tiers or {}).items()
    ]
    supported = axis("networks", "networks that exist", scale={"zero": True})
    views = {
        metric: lines(ROUNDS, axis("score", named(metric), scale={"zero": False}), series="tier"),
        "networks": lines(ROUNDS, supported, series="tier"),
    }
    text = (
        "A tier whose ratio has not been pruned for is shown with the smallest network that exists, so curves run "
        "together until their event. One seed."
    )
    chart = Chart("ofa-fl", "Drop and recovery", text, rows, views, ("method",))
    return Panel("ofa-fl", "OFA-FL: pruning events", charts=[chart])
