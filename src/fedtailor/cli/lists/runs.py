"""``fedtailor runs``: which runs there are, how they stand, what they reached and how much room they take."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.output import JsonOption, console, print_json
from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, headline, less_is_better
from fedtailor.report.amounts import short_name, size

if TYPE_CHECKING:
    from fedtailor.storage.run_folder import RunFolder

DAMAGED = "damaged"
NARROW = 14  # characters of a column beside names of runs, which may be long


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder: how they stand, the best mean over tiers, and their size on disk."""
    from fedtailor.storage.run_folder import METRICS, RunFolder

    if not folder.is_dir():
        raise FedtailorError(f"{folder}: no such folder; `fedtailor run` makes it")
    found = sorted(file.parent for file in folder.rglob(METRICS) if not file.parent.name.startswith("."))
    rows = [_row(RunFolder(path), folder) for path in found]
    if as_json:
        print_json(rows)
        return
    if not rows:
        console.print(f"No run in {folder}/", markup=False)
        return
    table = plain_table()
    table.add_column("run", overflow="fold")
    table.add_column("method", overflow="fold", max_width=NARROW)
    table.add_column("state", no_wrap=True)
    table.add_column("round", justify="right", no_wrap=True)
    table.add_column("best", justify="right", overflow="fold", max_width=NARROW)
    table.add_column("size", justify="right", no_wrap=True)
    for row in rows:
        cells = (
            short_name(row["method"]),
            row["state"],
            _rounds(row),
            _shown(row["best"]),
            size(row["bytes"]),
        )
        table.add_row(row["run"], *cells)
    console.print(Titled(f"Runs in {folder}/", table))


def _rounds(row: dict[str, Any]) -> str:
    """``8/20``; the rounds alone where the plan is unknown, or was made shorter after they were done."""
    planned = row["rounds"]
    return f"{row['round']}/{planned}" if planned and planned >= row["round"] else str(row["round"])


def _row(run: RunFolder, above: Path) -> dict[str, Any]:
    """A run as plain data; a folder whose files cannot be read is listed too."""
    from fedtailor.storage.run_folder import CONFIG, SETTINGS

    config: dict[str, Any] = {}
    records: list[RoundRecord] = []
    try:
        file = run.path / CONFIG
        said = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        config = run.setup().get(SETTINGS, {}) if said is None else said  # Python writes no config
        records, state = run.records(), run.state
    except (OSError, ValueError, RecursionError):
        state = DAMAGED
    method = config.get("method", {})
    return {
        "run": str(run.path.relative_to(above)) if run.path != above else run.path.name,
        "method": method.get("name", "own") if isinstance(method, dict) else "own",
        "state": state,
        "round": records[-1].round if records else 0,
        "rounds": config.get("rounds"),
        "best": _best(records),
        "bytes": sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file()),
    }


def _best(records: Sequence[RoundRecord]) -> dict[str, Any] | None:
    """The best evaluation: of the metric that a run is judged by, the mean over tiers."""
    means: list[dict[str, Any]] = []
    for record in records:
        if record.tiers:
            metric = headline(record.tiers)
            value = fmean(tier[metric] for tier in record.tiers.values())
            means.append({"metric": metric, "round": record.round, "value": value})
    if not means:
        return None
    sign = -1 if less_is_better(means[0]["metric"]) else 1
    return max(means, key=lambda mean: sign * mean["value"])


def _shown(best: dict[str, Any] | None) -> str:
    if best is None:
        return "-"
    metric, value = best["metric"], best["value"]
    shown = f"{100 * value:.1f} %" if metric.endswith("accuracy") else f"{value:.4g}"
    return shown if metric == "accuracy" else f"{metric} {shown}"
