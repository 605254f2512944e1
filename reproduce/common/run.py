"""The common benchmark: four tasks, three fleets, every method at equal compute and the best of a few rates.

    FEDTAILOR_DATA=... python -m reproduce.common.run [--list] [--draw] [experiment ...]

One command: rates are found first (``<task>-rates``: seed 1, one fleet, three rates for every method), then come the
first seed of every cell, two more seeds of methods that are near the best of some tier, and tailor without each of its
parts. Call it again after an interruption: what is in results.json or finished below runs/common is not repeated. At
the end, and with --draw alone, the tables of docs/which-method.md and its figure are made of what is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from reproduce.common import tables
from reproduce.common.plan import TASKS, experiments, rows
from reproduce.shared import charts
from reproduce.shared.papers import ROOT, Paper
from reproduce.shared.results import Results
from reproduce.shared.tables import tiers_of

PAGE = ROOT / "docs" / "which-method.md"
FIGURE = "which-method.svg"
FIGURE_FLEET = "uniform"


def draw(results: Results, folder: Path) -> None:
    """Write tables and figure into the page; with a folder of one's own, into a copy of it there."""
    cells = tables.cells_of(results)
    panels = [
        charts.points(f"{task}, {FIGURE_FLEET}: mean over tiers (%) over MB", found, charts.HEIGHT * number)
        for number, (task, found) in enumerate(_tradeoffs(results).items())
    ]
    if panels:
        charts.write(folder / FIGURE, panels)
    parts = {
        "ranks": tables.ranks(cells),
        "verdicts": tables.verdicts(cells),
        "parts": tables.ablations(results),
        "figure": [f"![accuracy over traffic](figures/{FIGURE})"] if panels else [tables.NOTHING],
        "cells": tables.every_cell(cells, results),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, made in parts.items():
        text = inserted(text, name, made)
    page = PAGE if folder == PAGE.parent / "figures" else folder / PAGE.name
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def _tradeoffs(results: Results) -> dict[str, dict[str, tuple[float, float]]]:
    """Of each task that has any: by method that serves all tiers the megabytes of a run, and its mean over tiers."""
    found = {task: rows(task, FIGURE_FLEET, results) for task in TASKS}
    return {
        task: {
            method: (
                fmean(run["bytes"] for run in row.values()) / 1e6,
                fmean(tables.accuracy(row, tier) for tier in tiers_of(every)),
            )
            for method, row in every.items()
            if tables.serves(row, tiers_of(every))
        }
        for task, every in found.items()
        if every
    }


def inserted(text: str, name: str, made: Iterable[str]) -> str:
    """A page with lines in the place of those between two marks.

    >>> inserted("a\\n<!-- made: x -->\\nold\\n<!-- end: x -->\\nb", "x", ["new"])
    'a\\n<!-- made: x -->\\n\\nnew\\n\\n<!-- end: x -->\\nb'
    """
    begin, end = f"<!-- made: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE.name} has no marks {begin} ... {end}")
    body = "\n".join(made).strip()
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


if __name__ == "__main__":
    Paper(Path(__file__), __doc__, experiments, draw).main()
