"""What the runs of a plan came to: records and budgets, cell by cell and method by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtailor.config import RunConfig
from fedtailor.elasticity.cutting.selections import WidthLike
from fedtailor.method import Method
from fedtailor.report.comparison import Known
from fedtailor.report.fairness import allowed_by, narrower, widths_of
from fedtailor.report.rules import has_statistics
from fedtailor.report.tables import join_by_tier
from fedtailor.report.targets import Records, guessing
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


def group_known(runs: Sequence[PlannedRun]) -> dict[Cell, Known]:
    """What the runs' setups say beside their records, for each cell of the grid."""
    setups: dict[Cell, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        found = setups.setdefault(run.cell, {})
        if run.variant not in found:
            found[run.variant] = run.folder.setup()
    methods = {run.variant: run.config.built_method for run in runs}
    return {cell: known_from(each, methods) for cell, each in setups.items()}


def known_from(setups: Mapping[str, Mapping[str, Any]], methods: Mapping[str, Method]) -> Known:
    """What is known of a comparison from one setup (``setup.json``) of each method; its data is that of all."""
    first = next(iter(setups.values()))
    less = (narrower_of(name, methods[name], widths_of(setup)) for name, setup in setups.items())
    return Known(
        {variant: allowed_by(setup) for variant, setup in setups.items()},
        guessing(first),
        int(first.get("data", {}).get("validation_examples", 0)),
        tuple(filter(None, less)),
        any(has_statistics(setup) for setup in setups.values()),
        tuple(each["chosen"]["why"] for each in setups.values() if "chosen" in each),
    )


def narrower_of(variant: str, method: Method, tiers: Mapping[str, WidthLike]) -> str:
    """Which tiers a method gives less than they may have, in a sentence; nothing where it does not."""
    return narrower(variant, f"{method.name}:widths", getattr(method, "widths", None), tiers)


def with_ending(records: Records, config: RunConfig) -> Records:
    """The records, the last of them with the figures of the round that the run ended with."""
    last = records[-1]
    if not config.stopping.restore_best:
        return records
    best = next(record for record in records if record.round == last.best_round)
    return [*records[:-1], replace(last, tiers=best.tiers, deployed=best.deployed)]
