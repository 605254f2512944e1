"""``fedtailor data show``: who holds what, as a table and a terminal picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import JsonOption, SetOption, console, load_torch, notice, print_json

app = typer.Typer(help="Look at data sets and at how they are spread over clients.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at data sets and at how they are spread over clients."""


@app.command("show")
def show(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one, the defaults.")] = None,
    overrides: SetOption = None,
    most: Annotated[int, typer.Option(help="Show at most this many clients.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show how many examples of which class each client holds."""
    load_torch()
    from fedtailor.config import load_config, make_config
    from fedtailor.data import picture
    from fedtailor.errors import require
    from fedtailor.objective import TASKS
    from fedtailor.run.setup import read_data

    require(most >= 1, "--most", most, "at least 1")
    given = overrides or []
    settings = load_config(config, given, notice) if config else make_config({}, given, notice)
    spread = read_data(settings, TASKS.get(settings.objective.task))
    if as_json:
        print_json({**picture.overview(spread), "rows": picture.rows(spread)})
        return
    console.print(picture.show(spread, most))
