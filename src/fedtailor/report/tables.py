"""Tables of results for the terminal."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedtailor.report.units import short, size
from fedtailor.run.result import Run

Row = Mapping[str, Any]


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """What all rounds together cost."""
    refused: Counter[str] = Counter()
    for row in rows:
        refused.update(row["refused"])
    return {
        "rounds": rows[-1]["round"],
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "macs": sum(row["macs"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "refused": dict(sorted(refused.items())),
        "abandoned": sum(row.get("abandoned", 0) for row in rows),
        "resting": rows[-1].get("resting", 0),
    }


def run_summary(run: Run) -> dict[str, Any]:
    """The end of a run as plain data."""
    return {
        "method": run.method.name,
        "dataset": run.data.name,
        "tiers": run.tiers,
        **totals([{**each.as_row(), "seconds": each.seconds} for each in run.history]),
    }


def tier_table(title: str, run: Run) -> Table:
    """One row per tier: what its device runs, and how well."""
    metrics = list(next(iter(run.tiers.values())))
    table = Table(title=title, title_justify="left")
    for column in ("tier", "width", "parameters", "MACs"):
        table.add_column(column, justify="right", no_wrap=True)
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
    for tier in run.fleet.tiers:
        cut = run.method.cut_for(run.state, tier.budget, run.model)
        cost = run.model.cost(cut)
        values = [shown(metric, run.tiers[tier.name][metric]) for metric in metrics]
        table.add_row(tier.name, cut.tag, f"{cost.params:,}", short(cost.macs), *values)
    return table


def comparison_table(title: str, results: Mapping[str, Sequence[Sequence[Row]]]) -> Table:
    """One row per method, one column per tier: the mean over seeds, and the deviation where there are several."""
    first = next(iter(results.values()))[0]
    tiers = list(first[-1]["tiers"])
    metric = next((key for key in first[-1]["tiers"][tiers[0]] if key != "loss"), "loss")
    spread_over = ", mean ± deviation over seeds" if len(next(iter(results.values()))) > 1 else ""
    caption = f"{metric} per tier at the end{spread_over}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("method", overflow="fold", min_width=10)
    for tier in tiers:
        table.add_column(tier, justify="right", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    for method, runs in results.items():
        ends = [rows[-1]["tiers"] for rows in runs]
        cells = [spread(metric, [end[tier][metric] for end in ends]) for tier in tiers]
        sums = [totals(rows) for rows in runs]
        sent = statistics.mean(total["bytes_down"] + total["bytes_up"] for total in sums)
        table.add_row(method, *cells, size(sent))
    return table


def join_by_tier(runs: Mapping[str, Sequence[Row]]) -> Sequence[Row]:
    """Several runs as one: each tier's figures from the run that was made for it, the costs of all together."""
    if len(runs) == 1:
        return next(iter(runs.values()))
    joined = []
    for rows in zip(*runs.values(), strict=True):
        row = dict(rows[0])
        if "tiers" in row:
            row["tiers"] = {tier: each["tiers"][tier] for tier, each in zip(runs, rows, strict=True)}
        for key in ("bytes_down", "bytes_up", "macs", "seconds"):
            row[key] = sum(each[key] for each in rows)
        row["refused"] = dict(sum((Counter(each["refused"]) for each in rows), Counter()))
        joined.append(row)
    return joined


def comparison_rows(results: Mapping[str, Sequence[Sequence[Row]]]) -> list[dict[str, Any]]:
    """The comparison as plain data: mean and sample deviation of every metric and tier."""
    answer = []
    for method, runs in results.items():
        ends = [rows[-1]["tiers"] for rows in runs]
        tiers = {
            tier: {
                metric: mean_and_deviation([end[tier][metric] for end in ends]) for metric in ends[0][tier]
            }
            for tier in ends[0]
        }
        answer.append(
            {"method": method, "seeds": len(runs), "tiers": tiers, "runs": [totals(rows) for rows in runs]}
        )
    return answer


def mean_and_deviation(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation; one value has none."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "deviation": deviation}


def spread(metric: str, values: Sequence[float]) -> str:
    """``97.1±0.3``: five of them fit beside each other in a terminal of 80 columns."""
    factor = 100 if metric == "accuracy" else 1
    digits = 1 if metric == "accuracy" else 3
    text = f"{factor * statistics.mean(values):.{digits}f}"
    return f"{text}±{factor * statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def shown(metric: str, value: float) -> str:
    """A metric for people: accuracy in per cent, everything else as a number."""
    if not math.isfinite(value):
        return str(value)
    return f"{100 * value:.1f} %" if metric.endswith("accuracy") else f"{value:.4g}"
