"""Run folders as records: which runs belong together, and how each is called."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.charts.panel import RunRecord
from fedtailor.errors import FedtailorError
from fedtailor.report.tables import join_by_tier
from fedtailor.storage.files import in_use
from fedtailor.storage.run_folder import CONFIG, ENVIRONMENT, METRICS, SETUP, RunFolder

COMPARISON = "comparison.json"


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """All runs in these folders: a run, the folder of a comparison, or any folder that holds runs."""
    found: dict[Path, dict[str, Any]] = {}
    for path in paths:
        here = {folder: _named(folder, path) for folder in _folders(path)}
        if not here:
            raise FedtailorError(
                f"{path}: no run there; expected a folder with {METRICS}, or one that holds such"
            )
        found.update(here)
    records = [_record(folder, named) for folder, named in found.items()]
    return _joined(_labelled([record for record in records if record.rows]), found)


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


def _record(folder: Path, named: Mapping[str, Any]) -> RunRecord:
    run = RunFolder(folder)
    config = _read(folder / CONFIG, tomllib.loads)
    method = config.get("method", {}).get("name", "own method")
    return RunRecord(
        label=named.get("label", ""),
        setting=", ".join(f"{key}={value}" for key, value in named.get("cell", {}).items()),
        seed=config.get("seed", 0),
        method=method,
        state="finished" if run.finished else "running" if in_use(folder) else "interrupted",
        folder=str(folder),
        rows=[{**record.as_row(), "seconds": record.seconds} for record in run.records()],
        notes=[
            {
                "round": r.round,
                "cuts": [{"count": c.count, **c.cut, "tags": c.tags} for c in r.coverage],
                "method": r.method,
                "deployed": r.deployed,
            }
            for r in run.records()
        ],
        setup=_read(folder / SETUP, json.loads),
        config=config,
        environment=_read(folder / ENVIRONMENT, json.loads),
        tables={name: table.tolist() for name, table in run.load_diagnostics().items()},
    )


def _read(file: Path, parse: Any) -> dict[str, Any]:
    return dict(parse(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _labelled(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs without a name of their own are called by their method and the settings in which they differ."""
    nameless = [record for record in records if not record.label]
    settings = {id(record): flat(record.config) for record in nameless}
    keys = sorted({key for each in settings.values() for key in each} - {"name", "seed", "method.name"})
    differing = [key for key in keys if len({settings[id(record)].get(key) for record in nameless}) > 1]
    same_method: dict[str, list[RunRecord]] = {record.method: [] for record in nameless}
    for record in nameless:
        same_method[record.method].append(record)

    def label(record: RunRecord) -> str:
        own = settings[id(record)]
        others = same_method[record.method]
        told = [key for key in differing if len({settings[id(other)].get(key) for other in others}) > 1]
        parts = [
            f"{key.removeprefix('method.')}={own.get(key)}" for key in told if not key.startswith("engine.")
        ]
        return " ".join([record.method, *parts])

    return [record if record.label else replace(record, label=label(record)) for record in records]


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested settings as ``data.alpha -> 0.5``."""
    found: dict[str, str] = {}
    for key, value in table.items():
        name = f"{above}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)})
    return found


def _joined(records: Sequence[RunRecord], named: Mapping[Path, Mapping[str, Any]]) -> list[RunRecord]:
    """Runs that were made for one tier each are one record."""
    joined: list[RunRecord] = []
    parts: dict[tuple[str, str, int], dict[str, RunRecord]] = {}
    for record in records:
        tier = named.get(Path(record.folder), {}).get("tier", "")
        if not tier:
            joined.append(record)
            continue
        parts.setdefault((record.label, record.setting, record.seed), {})[tier] = record
    for by_tier in parts.values():
        first = next(iter(by_tier.values()))
        shortest = min(len(record.rows) for record in by_tier.values())
        rows = join_by_tier({tier: record.rows[:shortest] for tier, record in by_tier.items()})
        joined.append(replace(first, rows=rows, notes=(), folder=str(Path(first.folder).parent)))
    return joined
