"""OFA-FL's pruning events, for a report."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.charts.panel import Chart, Panel, RunRecord, axis, lines, panel


@panel("ofa-fl")
def drop_and_recovery(runs: Sequence[RunRecord]) -> Panel | None:
    """The paper's figure 4: accuracy falls at every pruning event and comes back."""
    records = [
        {
            "method": run.label,
            "rounds": row["round"],
            "tier": tier,
            "loss": scores["loss"],
            "networks": len(row["method"].get("supported", ())),
            **({"accuracy": round(100 * scores["accuracy"], 3)} if "accuracy" in scores else {}),
        }
        for run in {run.label: run for run in reversed(runs)}.values()  # one seed of each variant
        for row in run.rows
        for tier, scores in (row.get("tiers") or {}).items()
    ]
    if not records:
        return None
    score = "accuracy" if "accuracy" in records[0] else "loss"
    title = "accuracy (%)" if score == "accuracy" else "loss"
    rounds = axis("rounds", "rounds")
    supported = axis("networks", "networks that exist", scale={"zero": True})
    views = {
        title: lines(rounds, axis(score, title, scale={"zero": False}), series="tier"),
        "networks": lines(rounds, supported, series="tier"),
    }
    text = (
        "A tier whose ratio has not been pruned for is shown with the smallest network that exists, so curves run "
        "together until their event. One seed."
    )
    chart = Chart("ofa-fl", "Drop and recovery", text, records, views, ("method",))
    return Panel("ofa-fl", "OFA-FL: pruning events", charts=[chart])
