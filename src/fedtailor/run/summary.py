"""The end of a run for people and programs: as a table of its tiers, as plain data."""

from __future__ import annotations

from typing import Any

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.record import headline
from fedtailor.report.amounts import short
from fedtailor.report.tables import shown, totals
from fedtailor.run.describing import left_out
from fedtailor.run.result import Run
from fedtailor.server.stopping import MEAN


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


def tier_table(title: str, run: Run) -> Titled:
    """One row per tier: what its device runs, and how well."""
    metrics = list(next(iter(run.tiers.values())))
    table = plain_table()
    for column in ("tier", "width", "parameters", "MACs"):
        table.add_column(column, justify="right", no_wrap=True)
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
    for tier in run.fleet.tiers:
        cut = run.method.cut_for(run.state, tier.budget, run.model)
        cost = run.model.cost(cut)
        values = [shown(metric, run.tiers[tier.name][metric]) for metric in metrics]
        table.add_row(tier.name, cut.tag, f"{cost.params:,}", short(cost.macs), *values)
    return Titled(title, table)


def choice_in_words(run: Run) -> str:
    """What was chosen, by which examples; nothing where no choice was made and nothing kept back for one."""
    stopping, kept = run.setup.settings.stopping, run.data.validation
    choosing = stopping.chooses or run.method.chooses
    if kept is None and not choosing:
        return ""
    tiers = next(record.tiers for record in run.history if record.tiers)
    metric = headline(tiers) if stopping.metric == "auto" else stopping.metric
    whose = f"mean {metric}" if stopping.tier == MEAN else f"{metric} of tier {stopping.tier}"
    best = f"Round {run.best_round} is the best by {whose} on"
    if kept is None:
        return f"{best} the test examples, which decided: its figures are a little too good (data.validation = 0)."
    count = len(kept.partition.order)
    decided = "which decided; test examples decided nothing" if choosing else "kept back from training"
    return f"{best} {count:,} validation examples, {decided}."
