"""What a report is made of, as plain data, and how a method adds its own panel beside its code.

    @panel("fedrolex")
    def windows(runs: Sequence[ReportedRun]) -> Panel | None: ...

``runs`` are those of the method in the report; what its ``notes`` returned is in ``record.method`` of ``run.records``.
Charts are Vega-Lite specifications without data: nothing here imports a plotting library, and nothing is drawn until
someone looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtailor.record import RoundRecord

Spec = dict[str, Any]
Row = dict[str, Any]  # of a chart's data, or of a table


@dataclass(frozen=True)
class ReportedRun:
    """A run as its folder tells it; nothing of it is computed anew."""

    variant: str  # the method, with the settings that tell it from others in the report
    setting: str  # the cell of a grid, or ""
    seed: int
    method: str
    state: str  # finished, running or interrupted
    folder: str
    records: Sequence[RoundRecord]
    setup: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the method's ``diagnostics`` left, as lists
    confusion: Mapping[str, Any] = field(
        default_factory=dict
    )  # of ``tiers``: true class -> answer -> examples
    devices: Mapping[str, Any] = field(default_factory=dict)  # of a run on other machines: who is there
    repeats: Sequence[str] = ()  # folders of the same run with the same seed, which count no second time


@dataclass(frozen=True)
class Chart:
    """A picture, its data, and what a person who cannot see it should know."""

    key: str  # names its CSV file
    title: str
    text: str  # what it shows, and how to read it
    data: Sequence[Row]
    views: Mapping[str, Spec]  # name -> specification without data; the first is shown
    filters: Sequence[str] = ()  # columns of which one value is shown at a time


@dataclass(frozen=True)
class Panel:
    """A section of a report."""

    key: str
    title: str
    text: str = ""  # several lines are a list
    charts: Sequence[Chart] = ()
    tables: Sequence[tuple[str, Sequence[Row]]] = ()  # caption, rows; ``place`` 1 is marked as the best
    facts: Sequence[tuple[str, str]] = ()  # name, value: at the top of the report


MethodPanel = Callable[[Sequence[ReportedRun]], Panel | None]

_PANELS: dict[str, list[MethodPanel]] = {}


def panel(method: str) -> Callable[[MethodPanel], MethodPanel]:
    """Register a panel for the runs of one method."""

    def add(function: MethodPanel) -> MethodPanel:
        known = _PANELS.setdefault(method, [])
        if function.__qualname__ not in [each.__qualname__ for each in known]:  # a module may be loaded anew
            known.append(function)
        return function

    return add


def panels_of(method: str) -> Sequence[MethodPanel]:
    """The panels that a method registered."""
    return tuple(_PANELS.get(method, ()))


# Specifications that most panels need


def axis(field: str, title: str, kind: str = "quantitative", **more: Any) -> Spec:
    """One encoding channel."""
    return {"field": field, "type": kind, "title": title, **more}


# Rounds are whole: no more ticks than there are steps from one to the next.
_STEPS = {"expr": "min(ceil(width / 40), max(1, domain('x')[1] - domain('x')[0]))"}
ROUNDS = axis(
    "rounds", "rounds", axis={"tickMinStep": 1, "tickCount": _STEPS, "format": "d"}, scale={"nice": False}
)
AMOUNTS = {"format": "~s"}  # of an axis: 300k, 1.2M, 4.5G, as fits the numbers
LINE = 20  # pixels of a line of a chart that has names beside its lines
FEW_ROWS = 12  # of a line: each of them is marked; of one alone there is no line
LINE_LEGEND = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2, "symbolSize": 500}


def lines(x: Spec, y: Spec, series: str = "method", low: str = "", high: str = "") -> Spec:
    """A line per series, with a band between two columns where they are given; the legend shows such lines.

    The last row of each is marked, and all rows where there are few: one evaluation is seen too.
    """
    plain = axis(series, series, "nominal", sort=None)
    shared: Spec = {"x": x, "color": {**plain, "legend": LINE_LEGEND}}
    told = {"y": y, "tooltip": _tooltip(x, y, series)}
    drawn: Spec = {**shared, **told, "strokeDash": {**plain, "legend": LINE_LEGEND}}
    marks: Spec = {"type": "point", "filled": True, "size": 45, "opacity": 1}
    layers: list[Spec] = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": drawn},
        {"transform": _last_rows(series, FEW_ROWS), "mark": marks, "encoding": {**shared, **told}},
    ]
    if low and high:
        band = {**shared, "y": {**y, "field": low}, "y2": {"field": high}}
        end = {"type": "rule", "strokeWidth": 3, "opacity": 0.4}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.18}, "encoding": band})
        layers.insert(1, {"transform": _last_rows(series), "mark": end, "encoding": band})
    return {"layer": layers, "height": 320}


def _last_rows(series: str, few: int = 1) -> list[Spec]:
    """Of every series the last row, and all of those that have at most ``few``."""
    count = {"joinaggregate": [{"op": "count", "as": "rows"}], "groupby": [series]}
    number = {"window": [{"op": "row_number", "as": "row"}], "groupby": [series]}
    return [count, number, {"filter": f"datum.row == datum.rows || datum.rows <= {few}"}]


def points(x: Spec, y: Spec, series: str = "method", **more: Spec) -> Spec:
    """A mark per row, told apart by colour and shape."""
    plain = axis(series, series, "nominal", sort=None)
    encoding = {"x": x, "y": y, "color": plain, "shape": plain, "tooltip": _tooltip(x, y, series), **more}
    return {"mark": {"type": "point", "size": 90, "filled": True}, "encoding": encoding, "height": 320}


def lines_and_points(x: Spec, mean: Spec, score: Spec, series: str = "method") -> Spec:
    """A line through means, and a mark for every row behind them."""
    line, marks = lines(x, mean, series)["layer"]
    del line["encoding"]["tooltip"]  # a column that is not averaged would split the line into its rows
    del marks["transform"]
    marks["encoding"] |= {"y": score, "tooltip": _tooltip(x, score, series)}
    return {"layer": [line, marks], "height": 320}


def bars(x: Spec, y: Spec, series: str = "method") -> Spec:
    """Grouped bars, each group over its label."""
    named = axis(series, series, "nominal", sort=None)
    encoding = {"x": x, "y": y, "color": named, "xOffset": named, "tooltip": _tooltip(x, y, series)}
    return {"mark": {"type": "bar"}, "encoding": encoding, "height": 300}


def lying_bars(x: Spec, y: Spec, lines: int, series: str = "method") -> Spec:
    """Grouped bars, each group beside its label: however long names are and however narrow the page, each is there.

    ``lines``: how many bars there are.
    """
    named = axis(series, series, "nominal", sort=None)
    encoding = {"x": x, "y": y, "color": named, "yOffset": named, "tooltip": _tooltip(x, y, series)}
    return {"mark": {"type": "bar"}, "encoding": encoding, "height": LINE * lines}


def spans(x: Spec, y: Spec, row: str, span: tuple[str, str], lines: int) -> Spec:
    """A line of its own for every ``row`` of a group ``y``, its mark with its name beside it, and the group's ``span``.

    Marks of equal values stand below each other, so that all of them are seen. ``lines``: how many rows there are.
    """
    named = axis(y["field"], y["title"], "nominal", sort=None, legend=None)
    at: Spec = {"x": x, "y": y, "yOffset": axis(row, row, "nominal", sort=None)}
    reach = {**at, "x": {**x, "field": span[0]}, "x2": {"field": span[1]}, "color": named}
    marks = {**at, "color": named, "tooltip": [{"field": row, "title": row}, *_tooltip(x, y, y["field"])]}
    name = {"type": "text", "align": "left", "dx": 8, "fontSize": 12}
    return {
        "layer": [
            {"mark": {"type": "bar", "opacity": 0.2}, "encoding": reach},
            {"mark": {"type": "point", "size": 70, "filled": True, "opacity": 1}, "encoding": marks},
            {"mark": name, "encoding": {**at, "text": {"field": row, "type": "nominal"}}},
        ],
        "height": LINE * lines,
    }


def heat(x: Spec, y: Spec, value: Spec) -> Spec:
    """A cell per row, stronger for more; zero is as quiet as the paper, unless the scale says otherwise."""
    scale = value.get("scale", {})
    quiet = {**value, "scale": scale if "domain" in scale else {**scale, "domainMin": 0}}
    encoding = {"x": x, "y": y, "color": quiet, "tooltip": _tooltip(x, y, value["field"])}
    return {"mark": {"type": "rect"}, "encoding": encoding, "height": 340}


def _tooltip(x: Spec, y: Spec, series: str) -> list[Spec]:
    shown = {each["field"]: {"title": each["title"], **_formatted(each)} for each in (x, y)}
    return [{"field": field, **each} for field, each in ({series: {"title": series}} | shown).items()]


def _formatted(channel: Spec) -> Spec:
    """An amount is shown with its unit's prefix, as on the axis."""
    large = channel.get("axis", {}).get("format") == AMOUNTS["format"]
    return {"type": "quantitative", "format": ".4~s"} if large else {}
