"""``fedtailor report``: one or many runs as a page, a text, tables or pictures."""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal, get_args

import typer

from fedtailor.cli.output import TargetOption, console, load_torch
from fedtailor.errors import FedtailorError, require

Format = Literal["html", "md", "csv", "png"]
FILES = ("html", "md")  # the others are folders
ENDINGS = {".html": "html", ".htm": "html", ".md": "md", ".csv": "csv", ".png": "png"}

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
    chosen = format_of(form, output)
    default = {"html": "report.html", "md": "report.md", "csv": "report-csv", "png": "report-png"}[chosen]
    place = output or Path(default)
    check_place(place, chosen, overwrite)
    load_torch()
    from fedtailor.report.export import write_report

    write_report(runs, place, target, chosen)
    console.print(f"Wrote {place}", markup=False, soft_wrap=True)


def format_of(form: str | None, output: Path | None) -> Format:
    """What was asked for, or what the output's name says; a name that says something else is refused."""
    ending = output.suffix.lower() if output else ""
    said = ENDINGS.get(ending)
    chosen = form or said or "html"
    require(chosen in get_args(Format), "--format", chosen, "html, md, csv or png")
    if ending and said != chosen and (form is None or chosen in FILES):
        hint = "; a browser prints the page as PDF" if ending == ".pdf" else ""
        expected = (
            f"a name that ends in .{chosen}" if form else "a name that ends in .html, .md, .csv or .png"
        )
        raise FedtailorError(f"--output {str(output)!r}: expected {expected}{hint}")
    return chosen  # type: ignore[return-value]


def check_place(place: Path, form: Format, overwrite: bool) -> None:
    """Refuse a place where the report cannot be written, or where one would be lost, before any work is done."""
    is_file = form in FILES
    if place.is_dir() if is_file else place.is_file():
        raise FedtailorError(f"{place} cannot be written: it is a {'folder' if is_file else 'file'}")
    taken = place.exists() if is_file else place.is_dir() and any(place.iterdir())
    if taken and not overwrite:
        raise FedtailorError(f"{place} exists already: choose another name, or replace it with --overwrite")
    above = next(each for each in (place, *place.absolute().parents) if each.is_dir())
    try:
        with TemporaryFile(dir=above):  # asked of the system itself, which knows more than permissions
            pass
        if place.is_file():
            place.open("ab").close()
        elif any(each.exists() and not each.is_dir() for each in place.absolute().parents):
            raise NotADirectoryError(errno.ENOTDIR, "a folder on the way is a file")
    except OSError as error:
        raise FedtailorError(f"{place} cannot be written: {error.strerror or error}") from error
