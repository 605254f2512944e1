"""FLANC's bases and coefficients, for a report."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.charts.panel import Chart, Panel, ReportedRun, Row, axis, heat, panel


@panel("flanc")
def bases(runs: Sequence[ReportedRun]) -> Panel | None:
    """The paper's figures 5 and 6: whether the bases are orthogonal, and how much each fragment is used."""
    first = list({run.variant: run for run in reversed(runs)}.values())  # one seed of each variant
    products = [row for run in first for row in _products(run)]
    fragments = [row for run in first for row in _fragments(run)]
    if not products:
        return None
    product = axis("product", "product", scale={"domain": [-1, 1], "domainMid": 0})
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
            products,
            {"matrix": matrix},
            ("method", "layer"),
        ),
        Chart(
            "flanc-coefficients",
            "Use of the fragments",
            "Mean absolute coefficient of every fragment (column of U_p) for each width. One seed.",
            fragments,
            {"fragments": used},
            ("method", "layer"),
        ),
    ]
    return Panel("flanc", "FLANC: bases and coefficients", charts=charts)


def _products(run: ReportedRun) -> list[Row]:
    """Every entry of every Gram matrix."""
    grams = {name.partition("/")[2]: gram for name, gram in run.tables.items() if name.startswith("gram/")}
    return [
        {"method": run.variant, "layer": layer, "row": i, "column": j, "product": round(value, 4)}
        for layer, gram in grams.items()
        for i, products in enumerate(gram)
        for j, value in enumerate(products)
    ]


def _fragments(run: ReportedRun) -> list[Row]:
    """How much every width uses each fragment of a layer."""
    names = [name for name in run.tables if not name.startswith("gram/")]
    return [
        {"method": run.variant, "layer": layer, "width": width, "fragment": i, "size": round(value, 6)}
        for name in names
        for layer, _, width in [name.partition("/")[2].partition("/")]
        for i, value in enumerate(run.tables[name])
    ]
