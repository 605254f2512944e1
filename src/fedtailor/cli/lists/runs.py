"""``fedtailor runs``: which runs there are, how they stand, what they reached and how much room they take."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedtailor.cli.output import JsonOption, console, print_json
from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, headline, less_is_better
from fedtailor.report.amounts import size

if TYPE_CHECKING:
    from fedtailor.storage.run_folder import RunFolder

DAMAGED = "damaged"


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
    table = Table(title=f"Runs in {folder}/", title_justify="left")
    table.add_column("run", overflow="fold")
    for column in ("method", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("round", "best", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        rounds = f"{row['round']}/{row['rounds'] or '?'}"
        table.add_row(
            row["run"], row["method"], row["state"], rounds, _shown(row["best"]), size(row["bytes"])
        )
    console.print(table)


def _row(run: RunFolder, above: Path) -> dict[str, Any]:
    """A run as plain data; a folder whose files cannot be read is listed too."""
    from fedtailor.storage.run_folder import CONFIG

    config: dict[str, Any] = {}
    records: list[RoundRecord] = []
    try:
        file = run.path / CONFIG
        config = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        records, state = run.records(), run.state
    except (OSError, ValueError):
        state = DAMAGED
    return {
        "run": str(run.path.relative_to(above)) if run.path != above else run.path.name,
        "method": config.get("method", {}).get("name", "own"),
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
    percent = best["metric"] == "accuracy"
    return f"{100 * best['value']:.1f} %" if percent else f"{best['metric']} {best['value']:.4g}"
