"""``fedtailor methods``: what can be run, and with which settings."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.table import Table

from fedtailor.cli.output import JsonOption, console, print_json


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the card of one method.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods and their settings, or show the card of one of them."""
    from fedtailor.methods.registry import method_card, method_names

    if name is not None and not as_json:
        console.print(
            Markdown(method_card(name).partition("---\n")[2].partition("---\n")[2] or method_card(name))
        )
        return
    chosen = [name] if name is not None else method_names()
    rows = [_row(each) for each in chosen]
    if as_json:
        print_json(rows)
        return
    table = Table(
        title="Methods", title_justify="left", caption="fedtailor methods NAME shows a method's card"
    )
    for column in ("name", "what it does", "settings"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row["name"], row["summary"], "\n".join(f"{k} = {v}" for k, v in row["settings"].items())
        )
    console.print(table)


def _row(name: str) -> dict[str, Any]:
    from fedtailor.methods.registry import get_method

    method = get_method(name)
    settings = {f.name: str(f.default) for f in dataclasses.fields(method) if f.name != "local"}
    summary = (method.__doc__ or "").strip().splitlines()[0]
    return {"name": name, "summary": summary, "settings": settings}
