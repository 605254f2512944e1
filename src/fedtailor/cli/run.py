"""``fedtailor run``: train one global model over unequal clients and show the result."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor.cli.output import (
    JsonOption,
    RoundProgress,
    SetOption,
    console,
    print_json,
    refuse_if_in_use,
    stoppable,
)

if TYPE_CHECKING:
    from fedtailor.run import Run


def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; `fedtailor init` writes one.")],
    overrides: SetOption = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds all runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Train one global model over unequal clients, and show the accuracy of every tier."""
    refuse_if_in_use(runs / _name(config, overrides or []))
    from fedtailor.config import load_config
    from fedtailor.run import run_config

    settings = load_config(config, overrides or [])
    folder = runs / settings.name
    title = f"{settings.name} ({settings.method['name']})"
    command = f"fedtailor resume {folder}"
    with stoppable(folder, command), RoundProgress(title, settings.rounds) as progress:
        finished = run_config(settings, folder, progress)
    show(finished, folder, as_json)


def show(finished: Run, folder: Path, as_json: bool) -> None:
    """The end of a run, for a person or a program."""
    from fedtailor.report.tables import run_summary, tier_table

    summary = run_summary(finished)
    if as_json:
        print_json({"folder": str(folder), **summary})
        return
    console.print(tier_table(f"{finished.method.name} on {finished.data.name}", finished))
    if summary["refused"]:
        counted = ", ".join(f"{count} x {reason}" for reason, count in summary["refused"].items())
        console.print(f"Refused updates: {counted}", markup=False)
    if summary["abandoned"]:
        console.print(
            f"Abandoned for want of a quorum and tried again: {summary['abandoned']} x", markup=False
        )
    if summary["resting"]:
        console.print(f"Clients not asked any more after refused updates: {summary['resting']}", markup=False)
    console.print(
        f"Files: {folder}/  (config.toml, environment.json, metrics.jsonl, weights.safetensors)", markup=False
    )


def _name(config: Path, overrides: list[str]) -> str:
    """The run's name as far as it can be told without PyTorch; what is wrong with the config is said later."""
    try:
        name = tomllib.loads(config.read_text(encoding="utf-8")).get("name", "run")
    except (OSError, ValueError):
        return "run"
    for override in overrides:
        key, _, value = override.partition("=")
        name = value.strip().strip("\"'") if key.strip() == "name" else name
    return str(name)
