"""FLANC's bases and coefficients, for a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedtailor.charts.panel import Chart, Panel, RunRecord, axis, heat, panel


@panel("flanc")
def bases(runs: Sequence[RunRecord]) -> Panel | None:
    """The paper's figures 5 and 6: whether the bases are orthogonal, and how much each fragment is used."""
    grams: list[dict[str, Any]] = []
    coefficients: list[dict[str, Any]] = []
    for run in {run.label: run for run in reversed(runs)}.values():  # one seed of each variant
        for name, values in run.tables.items():
            kind, _, rest = name.partition("/")
            if kind == "gram":
                grams += [
                    {"method": run.label, "layer": rest, "row": i, "column": j, "product": round(value, 4)}
                    for i, row in enumerate(values)
                    for j, value in enumerate(row)
                ]
            else:
                layer, _, width = rest.partition("/")
                coefficients += [
                    {
                        "method": run.label,
                        "layer": layer,
                        "width": width,
                        "fragment": i,
                        "size": round(value, 6),
                    }
                    for i, value in enumerate(values)
                ]
    if not grams:
        return None
    product = axis("product", "product", scale={"domain": [-1, 1], "scheme": "redblue"})
    matrix = heat(axis("column", "basis", "ordinal"), axis("row", "basis", "ordinal"), product)
    used = heat(
        axis("fragment", "fragment", "ordinal"), axis("width", "width", "nominal"), axis("size", "mean size")
    )
    charts = [
        Chart(
            "flanc-gram",
            "Products of bases",
            "V V^T of a layer at the end of the run: 1 on the diagonal, 0 elsewhere is what the regulariser asks. "
            "One seed.",
            grams,
            {"matrix": matrix},
            ("method", "layer"),
        ),
        Chart(
            "flanc-coefficients",
            "Use of the fragments",
            "Mean absolute coefficient of every fragment (column of U_p) for each width. One seed.",
            coefficients,
            {"fragments": used},
            ("method", "layer"),
        ),
    ]
    return Panel("flanc", "FLANC: bases and coefficients", charts=charts)
