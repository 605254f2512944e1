"""A report as one HTML file that opens offline: data, charts and the script that draws them are all inside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from fedtailor import __version__
from fedtailor.charts.panel import Chart, Panel
from fedtailor.charts.terminal import GLUE, glued
from fedtailor.errors import FedtailorError
from fedtailor.storage.rows import as_text


def require_charts() -> Any:
    """The library that draws, or an error that says how to get it."""
    try:
        import vl_convert
    except ImportError as error:
        raise FedtailorError(
            "charts need vl-convert-python: pip install 'fedtailor[report]', in a checkout pip install -e '.[report]' "
            "(--format csv and md do without)"
        ) from error
    return vl_convert


def page(title: str, panels: Sequence[Panel], *, live: bool = False) -> str:
    """The whole file. A ``live`` page asks its server for new data."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"glued": glued, "breakable": breakable, "headed": headed}
    template = environment.from_string(_text("page.html"))
    return template.render(
        title=title,
        version=__version__,
        panels=panels,
        columns=columns,
        live=live,
        style=_text("page.css"),
        library=_library(),
        script=_text("page.js"),
        charts=_embedded(chart_data(panels)),
    )


def breakable(value: object) -> Markup:
    """A name that lines break in behind a colon or an equals sign alone; one that has none, between its words.

    >>> print(breakable("fedavg:only_able=true"), breakable("weight_decay"), breakable("1.46 MB"))
    fedavg:<wbr>only_able=<wbr>true weight_<wbr>decay 1.46 MB
    """
    text = str(value)
    parts = re.split(r"(?<=[:=])(?=\S)", text)
    if len(parts) == 1:
        parts = re.split(r"(?<=[A-Za-z][_.])(?=[A-Za-z])", text)
    return Markup("<wbr>").join(parts)


def headed(name: str) -> Markup:
    """The head of a column in at most two lines: it breaks at one place, the one that makes it narrowest.

    >>> print(headed("rounds to 68.0 %").replace(GLUE, "_"), headed("sent"))
    rounds to_68.0_% sent
    """
    words = glued(name).replace("tier ", f"tier{GLUE}").split(" ")
    places = range(1, len(words))
    halves = [(GLUE.join(words[:place]), GLUE.join(words[place:])) for place in places]
    return breakable(" ".join(min(halves, key=lambda each: max(map(len, each)), default=words)))


def chart_data(panels: Sequence[Panel]) -> dict[str, Any]:
    """All charts as data, column by column: names are written once, not in every row."""
    return {chart.key: _packed(chart) for panel in panels for chart in panel.charts}


def columns(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of some records, in the order in which they appear."""
    return list(dict.fromkeys(key for record in records for key in record))


def _packed(chart: Chart) -> dict[str, Any]:
    names = columns(chart.data)
    return {
        "title": chart.title,
        "text": chart.text,
        "columns": names,
        "values": [[record.get(name) for record in chart.data] for name in names],
        "views": dict(chart.views),
        "filters": list(chart.filters),
    }


def _embedded(value: Any) -> str:
    """JSON inside a script element: nothing in it can end the element."""
    return as_text(value, tight=True).replace("<", "\\u003c")


@cache
def _library() -> str:
    return str(require_charts().javascript_bundle()).replace("</script", "<\\/script")


def _text(name: str) -> str:
    return (resources.files("fedtailor.report") / name).read_text(encoding="utf-8")
