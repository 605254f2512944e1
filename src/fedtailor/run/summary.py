"""The end of a run for people and programs: as a table of its tiers, as plain data."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from fedtailor.report.amounts import short
from fedtailor.report.tables import shown, totals
from fedtailor.run.describing import left_out
from fedtailor.run.result import Run


def run_summary(run: Run) -> dict[str, Any]:
    """The end of a run as plain data."""
    kept = run.data.validation
    known = {
        "method": run.method.name,
        "dataset": run.data.name,
        "tiers": run.tiers,
        "best_round": run.best_round,
        "validation_examples": 0 if kept is None else len(kept.partition.order),
        **totals(run.history),
    }
    return known | ({"too_small": left_out(run.setup)} if run.fleet.whole else {})


def tier_table(title: str, run: Run) -> Table:
    """One row per tier: what its device runs, and how well."""
    metrics = list(next(iter(run.tiers.values())))
    table = Table(title=title, title_justify="left")
    for column in ("tier", "width", "parameters", "MACs"):
        table.add_column(column, justify="right", no_wrap=True)
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
    for tier in run.fleet.tiers:
        cut = run.method.cut_for(run.state, tier.budget, run.model)
        cost = run.model.cost(cut)
        values = [shown(metric, run.tiers[tier.name][metric]) for metric in metrics]
        table.add_row(tier.name, cut.tag, f"{cost.params:,}", short(cost.macs), *values)
    return table
