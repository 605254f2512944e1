"""Run folders as reported runs: which runs belong together, and how each is called."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.charts.panel import ReportedRun
from fedtailor.errors import FedtailorError
from fedtailor.report.tables import join_by_tier
from fedtailor.storage.run_folder import COMPARISON, CONFIG, ENVIRONMENT, METRICS, RunFolder


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """All runs in these folders: a run, the folder of a comparison, or any folder that holds runs."""
    found: dict[Path, dict[str, Any]] = {}
    for path in paths:
        here = {folder: _named(folder, path) for folder in _folders(path)}
        if not here:
            raise FedtailorError(
                f"{path}: no run there; expected a folder with {METRICS}, or one that holds such"
            )
        found.update(here)
    runs = [_reported(folder, named) for folder, named in found.items()]
    return _joined(_told_apart([run for run in runs if run.records]), found)


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
        for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
            if above / run["folder"] == folder:
                return dict(run)
    return {}


def _reported(folder: Path, named: Mapping[str, Any]) -> ReportedRun:
    run = RunFolder(folder)
    config = _read(folder / CONFIG, tomllib.loads)
    return ReportedRun(
        variant=named.get("variant", named.get("label", "")),  # plans of earlier versions: label
        setting=", ".join(f"{key}={value}" for key, value in named.get("cell", {}).items()),
        seed=config.get("seed", 0),
        method=config.get("method", {}).get("name", "own method"),
        state=run.state,
        folder=str(folder),
        records=run.records(),
        setup=run.setup(),
        config=config,
        environment=_read(folder / ENVIRONMENT, json.loads),
        tables={name: table.tolist() for name, table in run.load_diagnostics().items()},
    )


def _read(file: Path, parse: Any) -> dict[str, Any]:
    return dict(parse(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _told_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Runs without a name of their own are called by their method and the settings in which they differ."""
    nameless = [run for run in runs if not run.variant]
    settings = {id(run): flat(run.config) for run in nameless}
    keys = sorted({key for each in settings.values() for key in each} - {"name", "seed", "method.name"})
    keys = [key for key in keys if not key.startswith("engine.")]
    same_method: dict[str, list[ReportedRun]] = {}
    for run in nameless:
        same_method.setdefault(run.method, []).append(run)

    def variant(run: ReportedRun) -> str:
        others = [settings[id(other)] for other in same_method[run.method]]
        told = [key for key in keys if len({other.get(key) for other in others}) > 1]
        parts = [f"{key.removeprefix('method.')}={settings[id(run)].get(key)}" for key in told]
        return " ".join([run.method, *parts])

    return [run if run.variant else replace(run, variant=variant(run)) for run in runs]


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested settings as ``data.alpha -> 0.5``."""
    found: dict[str, str] = {}
    for key, value in table.items():
        name = f"{above}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)})
    return found


def _joined(runs: Sequence[ReportedRun], named: Mapping[Path, Mapping[str, Any]]) -> list[ReportedRun]:
    """Runs that were made for one tier each are one."""
    joined: list[ReportedRun] = []
    parts: dict[tuple[str, str, int], dict[str, ReportedRun]] = {}
    for run in runs:
        tier = named.get(Path(run.folder), {}).get("tier", "")
        if not tier:
            joined.append(run)
            continue
        parts.setdefault((run.variant, run.setting, run.seed), {})[tier] = run
    for by_tier in parts.values():
        first = next(iter(by_tier.values()))
        shortest = min(len(run.records) for run in by_tier.values())
        records = join_by_tier({tier: run.records[:shortest] for tier, run in by_tier.items()})
        joined.append(replace(first, records=records, folder=str(Path(first.folder).parent)))
    return joined
