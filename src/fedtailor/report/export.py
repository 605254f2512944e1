"""A report as files: the page, Markdown, a folder of CSV files, a folder of PNG pictures."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedtailor.charts.panel import Chart, Panel, Row, Spec
from fedtailor.errors import FedtailorError
from fedtailor.report.folders import read_runs
from fedtailor.report.page import columns, page, require_charts
from fedtailor.report.panels.all_panels import all_panels

Format = Literal["html", "md", "csv", "png"]

PNG_WIDTH, PNG_SCALE = 640, 1.5
SHADES = ["#f1f4f8", "#9ecae1", "#3182bd", "#08306b"]  # as on the page: nothing is quiet


def form_of(place: Path | str) -> Format:
    """The format that a file's name asks for; a page, if it asks for none of the others."""
    known: dict[str, Format] = {".md": "md", ".csv": "csv", ".png": "png"}
    return known.get(Path(place).suffix, "html")


def write_report(
    runs: Sequence[Path], place: Path, target: float | None = None, form: Format = "html"
) -> None:
    """Read the runs and write the report."""
    if form in ("html", "png"):
        require_charts()
    records = read_runs(runs)
    if not records:
        raise FedtailorError(f"{runs[0]}: no run there has finished a round yet")
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
    parts = [f"# {title}"]
    for panel in panels:
        if panel.facts:
            parts.append("\n".join(f"- {name}: {value}" for name, value in panel.facts))
            continue
        words = panel.text.split("\n")
        listed = "\n".join(f"- {line}" for line in words) if len(words) > 1 else panel.text
        parts += [f"## {panel.title}", *([listed] if listed else [])]
        for caption, rows in panel.tables:
            names = columns(rows)
            lines = [f"**{caption}**", "", _line(names), _line(["---"] * len(names))]
            parts.append("\n".join([*lines, *(_line([row.get(name, "") for name in names]) for row in rows)]))
        parts += [f"- {chart.title} (`{chart.key}.csv`): {chart.text}" for chart in panel.charts]
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV with a header; the same text that the page's button downloads."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns(records), restval="")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in record.items()} for record in records)
    return file.getvalue()


def _plain(value: Any) -> Any:
    """Whole numbers without a point, as JavaScript writes them."""
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
            if given.get("type") == "nominal":
                names = list(dict.fromkeys(row[given["field"]] for row in rows))
                given["scale"] = {**given.get("scale", {}), "domain": names}
    return spec
