"""``fedtailor methods``: what can be run, and with which settings."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedtailor.cards import card, summaries
from fedtailor.cli.output import JsonOption, console, load_torch, print_json


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the card of one method.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods, or show the card of one of them: what it does, its settings, what it costs."""
    if as_json:
        print_json(_rows(name))
    elif name is not None:
        from rich.markdown import Markdown

        console.print(Markdown(card(name) or _own_card(name)))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for each, summary in summaries().items():
            table.add_row(each, Text(summary, no_wrap=True, overflow="ellipsis"))
        console.print(table)
        console.print("\nfedtailor methods NAME shows a method's card, with its settings")


def _own_card(name: str) -> str:
    """The card of a method that is not among fedtailor's own."""
    load_torch()
    from fedtailor.methods.registry import method_card

    return method_card(name)


def _rows(name: str | None) -> list[dict[str, Any]]:
    load_torch()
    from fedtailor.methods.registry import get_method, method_names

    known, rows = summaries(), []
    for each in [name] if name is not None else method_names():
        method = get_method(each)
        described = (method.__doc__ or "").strip().partition("\n")[0]
        settings = {f.name: str(_default(f)) for f in dataclasses.fields(method) if f.name != "local"}
        rows.append({"name": each, "summary": known.get(each, described), "settings": settings})
    return rows


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
