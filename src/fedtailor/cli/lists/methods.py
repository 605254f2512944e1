"""``fedtailor methods``: what can be run, and with which settings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedtailor.cards import card, summaries
from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.output import JsonOption, console, load_torch, print_json

if TYPE_CHECKING:
    from fedtailor.method import Method

SETTINGS = "## Settings"
TRAINING = "`[training]` and `[server]` have the settings of training on clients and on the server, for every method."


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
        table = plain_table()
        table.add_column("name", no_wrap=True)
        table.add_column("what it does")
        for each, summary in summaries().items():
            table.add_row(each, Text(summary))
        console.print(
            Titled("Methods", table, "fedtailor methods NAME shows a method's card, with its settings")
        )


def _own_card(name: str) -> str:
    """The card of a method that is not among fedtailor's own; without one, what its class says of itself."""
    load_torch()
    from fedtailor.methods.registry import get_method, method_card

    method, text = get_method(name), method_card(name)
    return text if SETTINGS in text else "\n\n".join([text, SETTINGS, *_settings_table(method)]).strip()


def _settings_table(method: type[Method]) -> list[str]:
    """Every setting with its type and default, those of the class itself first."""
    from fedtailor.method import own_settings

    known = own_settings(method)
    own = [name for name in known if name in inspect.get_annotations(method)]
    lines = [
        f"| `{name}` | {_type(known[name])} | `{_word(_default(known[name]))}` |"
        for name in [*own, *(name for name in known if name not in own)]
    ]
    return ["\n".join(["| setting | type | default |", "|---|---|---|", *lines]), TRAINING]


def _type(field: dataclasses.Field[Any]) -> str:
    named = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    words = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or ").replace("'", '"'), named)
    return words.replace("|", "or")


def _word(value: Any) -> str:
    """As in a config; a setting without a default says so."""
    if value is dataclasses.MISSING:
        return "none: it must be set"
    return json.dumps(value) if isinstance(value, bool | str) else str(value)


def _rows(name: str | None) -> list[dict[str, Any]]:
    load_torch()
    from fedtailor.method import own_settings
    from fedtailor.methods.registry import get_method, method_names

    known, rows = summaries(), []
    for each in [name] if name is not None else method_names():
        method = get_method(each)
        described = (method.__doc__ or "").strip().partition("\n")[0]
        settings = {name: str(_default(item)) for name, item in own_settings(method).items()}
        rows.append({"name": each, "summary": known.get(each, described), "settings": settings})
    return rows


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
