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
from fedtailor.charts.panel import AMOUNTS, Chart, Panel, Row, axis, points
from fedtailor.report import accounting
from fedtailor.report.accounting import Reached
from fedtailor.report.amounts import short, signed
from fedtailor.report.comparison import costs_to_reach, target_of
from fedtailor.report.tables import shown
from fedtailor.report.targets import guessing

MATCHED = (
    "Best figures of the mean over seeds, and what more it took until that mean first matched the best of the next "
    "method below; below zero is less. FLOPs and parameters sent (numbers of four bytes, down and up) are those of all "
    "clients and rounds until then"
)


def pareto(runs: Runs, per_cent: float | None) -> Panel:
    """What the target cost, in bytes and in FLOPs; nobody is better in both than a method on the front."""
    rows: list[Row] = []
    goals: list[str] = []
    matched: list[Row] = []
    for setting, methods in by_setting(runs).items():
        results = {variant: list(map(evaluated, each)) for variant, each in methods.items()}
        metric, target = target_of(results, per_cent, guessing(next(iter(methods.values()))[0].setup))
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
            row |= {"target": goals[-1], "bytes": round_to(cost["bytes"])}
            row |= {"FLOPs": round_to(cost["flops"]), "rounds": round_to(cost["rounds"])}
            if "simulated_seconds" in cost:
                row["simulated hours"] = round_to(cost["simulated_seconds"] / 3600)
            row |= {"on the front": "yes" if variant in front else "no", "seeds": cost["seeds"]}
            rows.append(row)
    tables = [(MATCHED, matched)] if len(matched) > 1 else []
    if len(rows) < 2:  # one alone is compared with nobody
        return Panel("pareto", "What the best figures cost", tables=tables)
    x = axis("FLOPs", "FLOPs to the target", axis=AMOUNTS, scale={"zero": False})
    y = axis("bytes", "bytes to the target", axis=AMOUNTS, scale={"zero": False})
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
        "rounds": f"{line['round']:.3g}",
        "FLOPs": short(line["flops"]),
        "parameters sent": short(line["parameters"]),
        "matches": line.get("against", ""),
        "more FLOPs": signed(more["flops"]) if more else "",
        "more parameters sent": signed(more["parameters"]) if more else "",
    }  # fmt: skip
