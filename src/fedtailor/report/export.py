"""A report as files: the page, Markdown, a folder of CSV files, a folder of PNG pictures."""

from __future__ import annotations

import copy
import csv
import errno
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, get_args

from fedtailor.charts.panel import Chart, Panel, Row, Spec
from fedtailor.errors import FedtailorError, require
from fedtailor.report.page import columns, page, require_charts

Format = Literal["html", "md", "csv", "png"]
FILES = ("html", "md")  # the others are folders
ENDINGS = {".html": "html", ".htm": "html", ".md": "md", ".csv": "csv", ".png": "png"}

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what begins a formula in a spreadsheet
HARMLESS = re.compile(r"[-+][-+0-9.,±%*?() eE]*")  # numbers

PNG_WIDTH, PNG_SCALE = 640, 1.5
SHADES = ["#f1f4f8", "#9ecae1", "#3182bd", "#08306b"]  # as on the page: nothing is quiet


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
    if form in ("html", "png"):
        require_charts()
    is_file = form in FILES
    if place.is_dir() if is_file else place.is_file():
        raise FedtailorError(f"{place} cannot be written: it is a {'folder' if is_file else 'file'}")
    taken = place.exists() if is_file else place.is_dir() and any(place.iterdir())
    if taken and not overwrite:
        raise FedtailorError(
            f"{place} exists already: choose another name, or replace it with --overwrite (overwrite=True)"
        )
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


def write_report(
    runs: Sequence[Path],
    place: Path,
    target: float | None = None,
    form: Format = "html",
    *,
    saved: bool = True,
) -> None:
    """Read the runs and write the report; folders of runs that are not ``saved`` go away, and are not named."""
    from fedtailor.report.folders import read_runs
    from fedtailor.report.panels.all_panels import all_panels

    if form in ("html", "png"):
        require_charts()
    records = read_runs(runs)
    if not records:
        raise FedtailorError(f"{runs[0]}: no run there has finished a round yet")
    if not saved:
        records = [replace(run, folder="not saved", repeats=()) for run in records]
    panels = all_panels(records, target)
    title = " and ".join(dict.fromkeys(path.resolve().name for path in runs))
    try:
        if form == "csv":
            write_csv(panels, place)
        elif form == "png":
            write_png(panels, place)
        else:
            text = page(title, panels) if form == "html" else markdown(title, panels)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FedtailorError(f"{place} cannot be written: {error.strerror or error}") from error


def markdown(title: str, panels: Sequence[Panel]) -> str:
    """Words and tables; charts are named with what they show."""
    parts = [f"# {_words(title)}"]
    for panel in panels:
        if panel.facts:
            parts.append("\n".join(f"- {name}: {_words(str(value))}" for name, value in panel.facts))
            continue
        words = _words(panel.text).split("\n")
        listed = "\n".join(f"- {line}" for line in words) if len(words) > 1 else words[0]
        parts += [f"## {panel.title}", *([listed] if listed else [])]
        for caption, rows in panel.tables:
            names = columns(rows)
            lines = [f"**{_words(caption)}**", "", _line(names), _line(["---"] * len(names))]
            parts.append("\n".join([*lines, *(_line([row.get(name, "") for name in names]) for row in rows)]))
        parts += [f"- {chart.title} (`{chart.key}.csv`): {chart.text}" for chart in panel.charts]
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[Any]) -> str:
    return (
        "| " + " | ".join(_words(str(cell)).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    )


def _words(text: str) -> str:
    """A text in which nothing is HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") if "<" in text else text


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV with a header; the same text that the page's button downloads."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns(records), restval="")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in record.items()} for record in records)
    return file.getvalue()


def _plain(value: Any) -> Any:
    """Whole numbers without a point, as JavaScript writes them; no text that a spreadsheet would compute."""
    if isinstance(value, str) and value[:1] in FORMULA and not HARMLESS.fullmatch(value):
        return f"'{value}"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write_csv(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """One file per chart and one per table of the first panel."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {chart.key: chart.data for panel in panels for chart in panel.charts}
    for panel in panels:
        for number, (_caption, rows) in enumerate(panel.tables):
            files[f"{panel.key}-table{number + 1}"] = rows
    for key, records in files.items():
        (folder / f"{key}.csv").write_text(csv_text(records), encoding="utf-8", newline="")
    return [folder / f"{key}.csv" for key in files]


def write_png(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """The first view of every chart, with the first value of its filters."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in (chart for panel in panels for chart in panel.charts):
        file = folder / f"{chart.key}.png"
        file.write_bytes(png(chart))
        written.append(file)
    return written


def png(chart: Chart, view: str | None = None, **filters: Any) -> bytes:
    """One chart as a picture."""
    wanted = {name: chart.data[0][name] for name in chart.filters if chart.data} | filters
    rows = [record for record in chart.data if all(record[name] == value for name, value in wanted.items())]
    told = ", ".join(f"{name} {value}" for name, value in wanted.items())
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **with_series(chart.views[view or next(iter(chart.views))], rows),
        "title": chart.title + (f" ({told})" if told else ""),
        "width": PNG_WIDTH,
        "data": {"values": rows},
        "background": "white",
        "config": {
            "legend": {"orient": "bottom", "columns": 4, "labelLimit": 300},
            "axisXDiscrete": {"labelAngle": 0, "labelOverlap": True},
            "range": {"heatmap": SHADES, "ramp": SHADES},
        },
    }
    return bytes(require_charts().vegalite_to_png(spec, scale=PNG_SCALE))


def with_series(view: Spec, rows: Sequence[Row]) -> Spec:
    """The view with its series named, in the order of the rows: only so do colour and dashes share one legend."""
    spec = copy.deepcopy(view)
    for layer in spec.get("layer", [spec]):
        for channel in ("color", "strokeDash", "shape"):
            given = layer["encoding"].get(channel, {})
            if given.get("type") in ("nominal", "ordinal"):
                names = list(dict.fromkeys(row[given["field"]] for row in rows))
                given["scale"] = {**given.get("scale", {}), "domain": names}
    return spec
