"""What the target cost, and what it took to match another method."""

from __future__ import annotations

from fedtailor.charts.grouping import (
    Runs,
    by_setting,
    evaluated,
    named,
    of_common_seeds,
    percent,
    round_to,
    setting_filter,
)
from fedtailor.charts.panel import Chart, Panel, Row, axis, points
from fedtailor.report import accounting
from fedtailor.report.accounting import Reached
from fedtailor.report.comparison import costs_to_reach, target_of
from fedtailor.report.tables import shown


def pareto(runs: Runs, per_cent: float | None) -> Panel:
    """What the target cost, in bytes and in FLOPs; nobody is better in both than a method on the front."""
    rows: list[Row] = []
    goals: list[str] = []
    matched: list[Row] = []
    for setting, methods in by_setting(runs).items():
        results = {variant: list(map(evaluated, each)) for variant, each in methods.items()}
        metric, target = target_of(results, per_cent)
        at: Row = {"setting": setting} if setting else {}
        paired = {variant: list(map(evaluated, each)) for variant, each in of_common_seeds(methods).items()}
        matched += [
            _matched({**at, **line}, metric) for line in reversed(accounting.matching(paired, metric))
        ]
        if target is None:
            continue
        goals.append(shown(metric, target))
        costs = {k: v for k, v in costs_to_reach(results, target, metric).items() if v["reached"]}
        ends = {k: Reached(v["rounds"], v["macs"], v["bytes"], target) for k, v in costs.items()}
        front = accounting.pareto(ends)
        for variant, cost in costs.items():
            row: Row = {"method": variant, **at}
            row |= {"target": goals[-1], "megabytes": round_to(cost["bytes"] / 1e6)}
            row |= {"gigaflops": round_to(cost["flops"] / 1e9), "rounds": round_to(cost["rounds"])}
            row |= {"on the front": "yes" if variant in front else "no", "seeds": cost["seeds"]}
            rows.append(row)
    caption = "Best figures, and what more it took to match the next method below; below zero is less (mean over seeds)"
    tables = [(caption, matched)] if len(matched) > 1 else []
    if not rows:
        return Panel("pareto", "What the target costs", tables=tables)
    x = axis("gigaflops", "gigaFLOPs to the target", scale={"zero": False})
    y = axis("megabytes", "megabytes to the target", scale={"zero": False})
    spec = points(x, y)
    spec["mark"] = {**spec["mark"], "size": 160}
    spec["encoding"]["opacity"] = {
        "condition": {"test": "datum['on the front'] == 'yes'", "value": 1},
        "value": 0.4,
    }
    text = (
        f"Target: {', '.join(dict.fromkeys(goals))} (mean over device classes). Lower and further left is cheaper; "
        "a pale mark is beaten by another method. Methods that did not reach the target are not shown."
    )
    chart = Chart(
        "pareto", "FLOPs against bytes at the target", text, rows, {"both": spec}, setting_filter(runs)
    )
    return Panel("pareto", "What the target costs", charts=[chart], tables=tables)


def _matched(line: Row, metric: str) -> Row:
    """One row of Flado's Table 1 as it is shown."""
    more = line.get("more")
    return {
        "method": line["method"], **({"setting": line["setting"]} if "setting" in line else {}),
        f"best {named(metric)}": round_to(percent(metric) * line["best"], 4),
        "rounds": round_to(line["round"], 4),
        "gigaFLOPs": round_to(line["flops"] / 1e9, 4),
        "million parameters": round_to(line["parameters"] / 1e6, 4),
        "matches": line.get("against", ""),
        "more gigaFLOPs": round_to(more["flops"] / 1e9, 4) if more else "never" if "against" in line else "",
        "more million parameters": round_to(more["parameters"] / 1e6, 4) if more else "",
    }  # fmt: skip
