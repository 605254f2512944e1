"""How tables and sentences look in a terminal: one style for all commands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedtailor.errors import visible

GLUE = "\u00a0"  # between a number and what it counts, while lines are broken
LONGEST_NAME = 24  # characters of a method with its settings that are never broken


class PlainTable(Table):
    """A table whose cells and heads are text, never markup."""

    def add_column(self, header: Any = "", *others: Any, **options: Any) -> None:
        super().add_column(_text(header), *others, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_text, cells), **options)


def _text(cell: Any) -> Any:
    return Text(visible(cell)) if isinstance(cell, str) else cell


@dataclass(frozen=True)
class Words:
    """Sentences: lines break between words, never between a number and its unit, and go on below their first word."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in lines_of(visible(self.text), options.max_width):
            yield Text(line, style=self.style)


def lines_of(text: str, width: int) -> list[str]:
    """The text in lines of at most so many characters; a line that is indented goes on under its first word.

    >>> lines_of("  it holds in 95 % of cases", 15)
    ['  it holds in', '  95 % of cases']
    """
    indent = " " * (len(text) - len(text.lstrip()))
    kept = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return [line.replace(GLUE, " ") for line in kept.wrap(glued(text.strip()))] or [""]


def glued(text: str) -> str:
    """The text with spaces that no line breaks at, between numbers and what they count."""
    return re.sub(r"(?<=\d) (?=%|points?\b|seeds?\b|rounds?\b|[kMGT]?B\b|[kMGT]\b|x\b)", GLUE, text)


@dataclass(frozen=True)
class Titled:
    """A table under its title and over a caption, both as wide as the terminal, and a blank line."""

    title: str
    table: Table
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Words(self.title, "bold")
        yield self.table
        if self.caption:
            yield Words(self.caption, "dim")
        yield Text()


def plain_table(room: int = 2, *, heads: bool = True) -> Table:
    """A table without a frame: a line under the heads, ``room`` spaces between columns."""
    padding = (0, max(0, room - 1), 0, 0)
    return PlainTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, show_header=heads
    )


def table_of_methods(methods: Iterable[str]) -> Table:
    """A table whose first column holds whole names of methods, and one space between columns.

    Beside five tiers of ``97.1±0.3`` a terminal of 80 columns has room for names of ``LONGEST_NAME``; those that are
    longer, by their settings, are folded.
    """
    table = plain_table(room=1)
    table.add_column("method", overflow="fold", min_width=min(max(map(len, methods)), LONGEST_NAME))
    return table
