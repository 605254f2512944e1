"""``fedtailor run``: train one global model over unequal clients and show the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import JsonOption, RoundProgress, SetOption, console, print_json


def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; `fedtailor init` writes one.")],
    overrides: SetOption = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds all runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Train one global model over unequal clients, and show the accuracy of every tier."""
    from fedtailor.config import load_config
    from fedtailor.report.tables import run_summary, tier_table
    from fedtailor.run import run_config

    settings = load_config(config, overrides or [])
    folder = runs / settings.name
    with RoundProgress(f"{settings.name} ({settings.method['name']})", settings.rounds) as progress:
        finished = run_config(settings, folder, progress)
    summary = run_summary(finished)
    if as_json:
        print_json({"folder": str(folder), **summary})
        return
    console.print(tier_table(f"{settings.method['name']} on {finished.data.name}", finished))
    if summary["refused"]:
        counted = ", ".join(f"{count} x {reason}" for reason, count in summary["refused"].items())
        console.print(f"Refused updates: {counted}", markup=False)
    console.print(
        f"Files: {folder}/  (config.toml, environment.json, metrics.jsonl, weights.safetensors)", markup=False
    )
