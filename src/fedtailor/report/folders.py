"""Run folders as reported runs; ``likeness`` says which of them belong together."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.charts.panel import ReportedRun
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.report.likeness import called
from fedtailor.report.tables import join_by_tier
from fedtailor.storage.rows import table_in
from fedtailor.storage.run_folder import COMPARISON, CONFIG, ENVIRONMENT, METRICS, SETTINGS, RunFolder


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """All runs in these folders: a run, the folder of a comparison, or any folder that holds runs."""
    found: dict[Path, tuple[Path, dict[str, Any]]] = {}  # by where a folder really lies: each run once
    for path in paths:
        here = {folder.resolve(): (folder, _named(folder, path)) for folder in _folders(path)}
        if not here:
            raise FedtailorError(
                f"{path}: no run there; expected a folder with {METRICS}, or one that holds such"
            )
        found |= {place: each for place, each in here.items() if place not in found}
    runs = [(_reported(folder, named), named) for folder, named in found.values()]
    return called(_joined([(run, named) for run, named in runs if run.records]))


def _folders(path: Path) -> Iterator[Path]:
    if (path / METRICS).is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file.parent for file in path.rglob(METRICS) if not file.parent.name.startswith("."))


def _named(folder: Path, root: Path) -> dict[str, Any]:
    """What the plan of a comparison calls this run; nothing for a run that stands alone."""
    for above in [root, *folder.parents]:
        file = above / COMPARISON
        if not file.is_file():
            continue
        for run in _planned(file):
            if above / run["folder"] == folder:
                return {**run, "plan": str(above)}
    return {}


def _planned(file: Path) -> list[dict[str, Any]]:
    """The runs that a comparison names."""
    runs = table_in(file).get("runs")
    fine = isinstance(runs, list) and all(
        isinstance(run, dict)
        and isinstance(run.get("folder"), str)
        and isinstance(run.get("cell", {}), dict)
        and all(isinstance(run.get(key) or "", str) for key in ("variant", "label", "tier"))
        for run in runs
    )
    if not fine:
        raise CorruptError(f"{file} is damaged: expected a list of runs with their folders")
    return list(runs or ())


def _reported(folder: Path, named: Mapping[str, Any]) -> ReportedRun:
    run = RunFolder(folder)
    setup = run.setup()
    config = table_in(folder / CONFIG, tomllib.loads) or setup.get(SETTINGS, {})
    method, seed = config.get("method", {}), config.get("seed", 0)
    return ReportedRun(
        variant=named.get("variant", named.get("label", "")),  # plans of earlier versions: label
        setting=", ".join(f"{key}={value}" for key, value in named.get("cell", {}).items()),
        seed=seed if isinstance(seed, int) else 0,
        # earlier versions did not say
        method=str(method.get("name", "own method")) if isinstance(method, dict) else "own method",
        state=run.state,
        folder=str(folder),
        records=run.records(),
        setup=setup,
        config=config,
        environment=table_in(folder / ENVIRONMENT),
        confusion=run.confusion(),
        devices=run.devices(),
        tables={name: table.tolist() for name, table in run.load_diagnostics().items()},
    )


def _joined(found: Sequence[tuple[ReportedRun, Mapping[str, Any]]]) -> list[ReportedRun]:
    """Runs that were made for one tier each are one, of the settings that they share."""
    joined: list[ReportedRun] = []
    parts: dict[tuple[Any, ...], dict[str, ReportedRun]] = {}
    for run, named in found:
        if named.get("tier"):
            whole = parts.setdefault((named.get("plan"), run.variant, run.setting, run.seed), {})
            whole[named["tier"]] = run
        else:
            joined.append(run)
    for by_tier in parts.values():
        first, *others = by_tier.values()
        shortest = min(len(run.records) for run in by_tier.values())
        records = join_by_tier({tier: run.records[:shortest] for tier, run in by_tier.items()})
        config = _shared(first.config, [run.config for run in others])
        tables = {tier: run.confusion.get("tiers", {}).get(tier) for tier, run in by_tier.items()}
        confusion = {**first.confusion, "tiers": tables} if all(tables.values()) else {}
        folder = str(Path(first.folder).parent)
        joined.append(replace(first, records=records, config=config, confusion=confusion, folder=folder))
    return joined


def _shared(table: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that are the same in all."""
    kept: dict[str, Any] = {}
    for key, value in table.items():
        theirs = [other.get(key) for other in others]
        if isinstance(value, Mapping):
            kept[key] = _shared(value, [each for each in theirs if isinstance(each, Mapping)])
        elif all(each == value for each in theirs):
            kept[key] = value
    return kept
