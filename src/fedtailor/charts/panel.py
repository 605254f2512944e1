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
    tables: Sequence[tuple[str, Sequence[Row]]] = ()  # caption, rows


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


def lines(x: Spec, y: Spec, series: str = "method", low: str = "", high: str = "") -> Spec:
    """A line per series, with a band between two columns where they are given."""
    plain = axis(series, series, "nominal", sort=None)
    shared = {"x": x, "color": _solid(plain)}
    dashes: Spec = {**plain, "legend": None}
    drawn: Spec = {**shared, "y": y, "strokeDash": dashes, "tooltip": _tooltip(x, y, series)}
    layers: list[Spec] = [{"mark": {"type": "line", "strokeWidth": 2}, "encoding": drawn}]
    if low and high:
        band = {**shared, "y": {**y, "field": low}, "y2": {"field": high}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.18}, "encoding": band})
    return {"layer": layers, "height": 320}


def points(x: Spec, y: Spec, series: str = "method", **more: Spec) -> Spec:
    """A mark per row, told apart by colour and shape."""
    plain = axis(series, series, "nominal", sort=None)
    encoding = {"x": x, "y": y, "color": plain, "shape": plain, "tooltip": _tooltip(x, y, series), **more}
    return {"mark": {"type": "point", "size": 90, "filled": True}, "encoding": encoding, "height": 320}


def lines_and_points(x: Spec, mean: Spec, score: Spec, series: str = "method") -> Spec:
    """A line through means, and a mark for every row behind them."""
    line, marks = lines(x, mean, series)["layer"][0], points(x, score, series)
    del line["encoding"]["tooltip"]  # a column that is not averaged would split the line into its rows
    marks["encoding"] |= {"color": line["encoding"]["color"], "shape": line["encoding"]["strokeDash"]}
    return {"layer": [line, marks], "height": 320}


def _solid(plain: Spec) -> Spec:
    """A legend of full colours, also where the marks are pale."""
    return {**plain, "legend": {"symbolType": "square", "symbolOpacity": 1, "symbolStrokeWidth": 2}}


def bars(x: Spec, y: Spec, series: str = "method") -> Spec:
    """Grouped bars."""
    named = axis(series, series, "nominal", sort=None)
    encoding = {"x": x, "y": y, "color": named, "xOffset": named, "tooltip": _tooltip(x, y, series)}
    return {"mark": {"type": "bar"}, "encoding": encoding, "height": 300}


def heat(x: Spec, y: Spec, value: Spec) -> Spec:
    """A cell per row, darker for more."""
    encoding = {"x": x, "y": y, "color": value, "tooltip": _tooltip(x, y, value["field"])}
    return {"mark": {"type": "rect"}, "encoding": encoding, "height": 340}


def _tooltip(x: Spec, y: Spec, series: str) -> list[Spec]:
    names = {x["field"]: x["title"], y["field"]: y["title"], series: series}
    return [{"field": field, "title": title} for field, title in names.items()]
