"""``fedtailor report``: one or many runs as a page, a text, tables or pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedtailor.cli.output import console
from fedtailor.errors import FedtailorError, require

Format = Literal["html", "md", "csv", "png"]


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
    chosen = _format(form, output)
    default = {"html": "report.html", "md": "report.md", "csv": "report-csv", "png": "report-png"}[chosen]
    place = output or Path(default)
    write_report(runs, place, target, chosen)
    console.print(f"Wrote {place}", markup=False, soft_wrap=True)


def _format(form: str | None, output: Path | None) -> Format:
    guessed = {".md": "md", ".csv": "csv", ".png": "png"}.get(output.suffix if output else "", "html")
    chosen = form or guessed
    require(chosen in ("html", "md", "csv", "png"), "--format", chosen, "html, md, csv or png")
    return chosen  # type: ignore[return-value]


def write_report(
    runs: Sequence[Path], place: Path, target: float | None = None, form: Format = "html"
) -> None:
    """Read the runs and write the report."""
    from fedtailor.report import export
    from fedtailor.report.folders import read_runs
    from fedtailor.report.page import page, require_charts
    from fedtailor.report.panels.all_panels import all_panels

    if form in ("html", "png"):
        require_charts()
    records = read_runs(runs)
    if not records:
        raise FedtailorError(f"{runs[0]}: no run there has finished a round yet")
    panels = all_panels(records, target)
    title = " and ".join(dict.fromkeys(path.resolve().name for path in runs))
    try:
        if form == "csv":
            export.write_csv(panels, place)
        elif form == "png":
            export.write_png(panels, place)
        else:
            text = page(title, panels) if form == "html" else export.markdown(title, panels)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FedtailorError(f"{place} cannot be written: {error.strerror or error}") from error
