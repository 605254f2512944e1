"""FLANC's bases and coefficients, for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.charts.panel import Chart, Panel, RunRecord, axis, heat, panel

Rows = list[dict[str, Any]]
GRAM = "gram/"  # before the name of a layer; the other tables are of coefficients


@panel("flanc")
def bases(runs: Sequence[RunRecord]) -> Panel | None:
    """The paper's figures 5 and 6: whether the bases are orthogonal, and how much each fragment is used."""
    products: Rows = []
    sizes: Rows = []
    for run in {run.label: run for run in reversed(runs)}.values():  # one seed of each variant
        products += _products(run.label, run.tables)
        sizes += _sizes(run.label, run.tables)
    if not products:
        return None
    charts = [_orthogonality(products), _use(sizes)]
    return Panel("flanc", "FLANC: bases and coefficients", charts=charts)


def _products(method: str, tables: Mapping[str, Any]) -> Rows:
    """The products of all pairs of bases, layer by layer."""
    return [
        {
            "method": method,
            "layer": name.removeprefix(GRAM),
            "row": i,
            "column": j,
            "product": round(value, 4),
        }
        for name, values in tables.items()
        if name.startswith(GRAM)
        for i, row in enumerate(values)
        for j, value in enumerate(row)
    ]


def _sizes(method: str, tables: Mapping[str, Any]) -> Rows:
    """The mean size of the coefficients of every fragment, for each layer and width."""
    found: Rows = []
    for name, values in tables.items():
        if not name.startswith(GRAM):
            _, layer, width = name.split("/", 2)  # a width may be a fraction: 1/2
            found += [
                {"method": method, "layer": layer, "width": width, "fragment": i, "size": round(value, 6)}
                for i, value in enumerate(values)
            ]
    return found


def _orthogonality(products: Rows) -> Chart:
    product = axis("product", "product", scale={"domain": [-1, 1], "scheme": "redblue"})
    matrix = heat(axis("column", "basis", "ordinal"), axis("row", "basis", "ordinal"), product)
    return Chart(
        "flanc-gram",
        "Products of bases",
        "V V^T of a layer at the end of the run: 1 on the diagonal, 0 elsewhere is what the regulariser asks. "
        "One seed.",
        products,
        {"matrix": matrix},
        ("method", "layer"),
    )


def _use(sizes: Rows) -> Chart:
    used = heat(
        axis("fragment", "fragment", "ordinal"), axis("width", "width", "nominal"), axis("size", "mean size")
    )
    return Chart(
        "flanc-coefficients",
        "Use of the fragments",
        "Mean absolute coefficient of every fragment (column of U_p) for each width. One seed.",
        sizes,
        {"fragments": used},
        ("method", "layer"),
    )
