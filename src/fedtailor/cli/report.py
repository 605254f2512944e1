"""``fedtailor report``: one or many runs as a page, a text, tables or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor.cli.output import console
from fedtailor.errors import require

if TYPE_CHECKING:
    from fedtailor.report.export import Format


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
    target: Annotated[
        float | None,
        typer.Option(
            help="The accuracy, in per cent, whose cost is shown; default: one that every run reached."
        ),
    ] = None,
) -> None:
    """Show runs as one self-contained page that opens offline; also as Markdown, CSV or PNG."""
    from fedtailor.report.export import write_report

    chosen = _format(form, output)
    default = {"html": "report.html", "md": "report.md", "csv": "report-csv", "png": "report-png"}[chosen]
    place = output or Path(default)
    write_report(runs, place, target, chosen)
    console.print(f"Wrote {place}", markup=False, soft_wrap=True)


def _format(form: str | None, output: Path | None) -> Format:
    from fedtailor.report.export import form_of

    chosen = form or form_of(output or "")
    require(chosen in ("html", "md", "csv", "png"), "--format", chosen, "html, md, csv or png")
    return chosen  # type: ignore[return-value]
