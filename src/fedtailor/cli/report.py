"""``fedtailor report``: one or many runs as a page, a text, tables or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import TargetOption, console, load_torch

OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a report that is there already.")]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders that hold runs, e.g. runs/demo.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file (html, md) or the folder (csv, png) to write."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="html, md, csv or png; default: what the output's name says, or html."),
    ] = None,
    target: TargetOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Show runs as one self-contained page that opens offline; also as Markdown, CSV or PNG."""
    from fedtailor.report.export import check_place, format_of, write_report

    chosen = format_of(form, output)
    default = {"html": "report.html", "md": "report.md", "csv": "report-csv", "png": "report-png"}[chosen]
    place = output or Path(default)
    check_place(place, chosen, overwrite)
    load_torch()
    write_report(runs, place, target, chosen)
    console.print(f"Wrote {place}", markup=False, soft_wrap=True)
