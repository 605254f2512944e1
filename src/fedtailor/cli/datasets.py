"""``fedtailor datasets``: which data sets there are, and whether their files are here."""

from __future__ import annotations

from rich.table import Table

from fedtailor.cli.output import JsonOption, console, print_json


def datasets(as_json: JsonOption = False) -> None:
    """List the data sets, and whether their files were found here."""
    from fedtailor.data.datasets import dataset_names, describe

    rows = {name: describe(name) for name in dataset_names()}
    if as_json:
        print_json(rows)
        return
    table = Table(title="Data sets", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)
