"""What the runs of a plan came to: records and budgets, cell by cell and method by method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtailor.config import RunConfig
from fedtailor.report.fairness import Allowed, allowed_by
from fedtailor.report.tables import join_by_tier
from fedtailor.report.targets import Records
from fedtailor.sweep.plan import Cell, PlannedRun


def group_results(runs: Sequence[PlannedRun]) -> dict[Cell, dict[str, list[Records]]]:
    """The records of finished runs: cell of the grid -> method -> one list of records per seed."""
    parts: dict[tuple[Cell, str, int], dict[str, Records]] = {}
    for run in runs:
        records = with_ending(run.folder.records(), run.config)
        parts.setdefault((run.cell, run.variant, run.seed), {})[run.tier] = records
    results: dict[Cell, dict[str, list[Records]]] = {}
    for (cell, variant, _seed), by_tier in parts.items():
        results.setdefault(cell, {}).setdefault(variant, []).append(join_by_tier(by_tier))
    return results


def group_allowed(runs: Sequence[PlannedRun]) -> dict[Cell, dict[str, Allowed]]:
    """What budgets allow: cell of the grid -> method -> tier."""
    found: dict[Cell, dict[str, Allowed]] = {}
    for run in runs:
        found.setdefault(run.cell, {}).setdefault(run.variant, allowed_by(run.folder.setup()))
    return found


def with_ending(records: Records, config: RunConfig) -> Records:
    """The records, the last of them with the figures of the round that the run ended with."""
    last = records[-1]
    if not config.stopping.restore_best:
        return records
    best = next(record for record in records if record.round == last.best_round)
    return [*records[:-1], replace(last, tiers=best.tiers, deployed=best.deployed)]
