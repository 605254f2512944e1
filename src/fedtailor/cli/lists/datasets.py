"""``fedtailor datasets``: which data sets there are, and whether their files are here."""

from __future__ import annotations

from rich.text import Text

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.output import JsonOption, console, load_torch, print_json


def datasets(as_json: JsonOption = False) -> None:
    """List the data sets, and whether their files were found here."""
    load_torch()
    from fedtailor.data.datasets import dataset_names, describe, summary_and_state

    if as_json:
        print_json({name: describe(name) for name in dataset_names()})
        return
    table = plain_table()
    table.add_column("name", no_wrap=True)
    table.add_column("what it is, and whether it is here", overflow="fold")
    for name in dataset_names():
        summary, state = summary_and_state(name)
        table.add_row(name, Text(f"{summary}\n{state}"))
    console.print(Titled("Data sets", table))
