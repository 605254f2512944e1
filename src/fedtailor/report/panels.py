"""The panels that every report has. Each is a function from runs to plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fedtailor.charts.coverage import coverage, map_records, never_trained
from fedtailor.charts.grouping import (
    Runs,
    by_setting,
    evaluated_rows,
    named,
    networks,
    of_common_seeds,
    percent,
    round_to,
    setting_filter,
)
from fedtailor.charts.panel import (
    Chart,
    Panel,
    Record,
    axis,
    bars,
    heat,
    lines,
    lines_and_points,
    panels_of,
    points,
)
from fedtailor.report import accounting
from fedtailor.report.accounting import Spent
from fedtailor.report.answer import answer
from fedtailor.report.comparison import costs_to_reach, target_of
from fedtailor.report.folders import flat
from fedtailor.report.tables import shown
from fedtailor.report.targets import mean_over_tiers, metric_of, spent

AXES = {
    "rounds": axis("rounds", "rounds"),
    "megabytes sent": axis("megabytes", "megabytes sent, down and up"),
    "FLOPs": axis("gigaflops", "gigaFLOPs of all clients"),
    "simulated time": axis("hours", "simulated hours"),
}


def all_panels(runs: Runs, per_cent: float | None = None) -> list[Panel]:
    """The report, from the answer to the details."""
    evaluated = [run for run in runs if any(row.get("tiers") for row in run.rows)]
    panels: list[Panel] = []
    if evaluated:
        panels += [answer(evaluated, per_cent), progress(evaluated), widths(evaluated)]
        panels += [pareto(evaluated, per_cent), fairness(evaluated)]
    panels += [covered(runs), data(runs)]
    for method in dict.fromkeys(run.method for run in runs):
        own = [make([run for run in runs if run.method == method]) for make in panels_of(method)]
        panels += [each for each in own if each is not None]
    panels.append(provenance(runs))
    return [each for each in panels if each.charts or each.tables or each.text]


def progress(runs: Runs) -> Panel:
    """Accuracy against what was spent."""
    metric = metric_of(evaluated_rows(runs[0]))
    records: list[Record] = []
    timed = all("simulated_seconds" in row for run in runs for row in run.rows)
    for setting, methods in by_setting(runs).items():
        for label, each in methods.items():
            records += _curve(setting, label, each, metric, timed)
    score = axis("score", named(metric), scale={"zero": False})
    views = {
        name: lines(x, score, low="low", high="high")
        for name, x in AXES.items()
        if timed or name != "simulated time"
    }
    text = (
        "Mean over seeds; the band goes from the worst to the best seed. 'all' is the mean over device classes. "
        "Costs are those of all clients together."
    )
    chart = Chart(
        "progress", f"{metric} against what was spent", text, records, views, ("tier", *setting_filter(runs))
    )
    return Panel("progress", "How it was reached", charts=[chart])


def _curve(setting: str, label: str, runs: Runs, metric: str, timed: bool) -> list[Record]:
    """One record per evaluated round and tier, joined over seeds."""
    factor = percent(metric)
    seen: dict[int, list[tuple[dict[str, float], Mapping[str, Any], float]]] = {}
    for run in runs:
        clock = 0.0
        for row, total in zip(run.rows, spent(run.rows), strict=True):
            clock += row.get("simulated_seconds", 0.0)
            if row.get("tiers"):
                seen.setdefault(row["round"], []).append((total, row, clock))
    records: list[Record] = []
    for round, each in sorted(seen.items()):
        tiers = list(each[0][1]["tiers"])
        for tier in ("all", *tiers):
            scores = [
                factor * (mean_over_tiers(row, metric) if tier == "all" else row["tiers"][tier][metric])
                for _, row, _ in each
            ]
            record: Record = {"method": label, **({"setting": setting} if setting else {}), "tier": tier}
            record |= {
                "rounds": round,
                "megabytes": round_to(statistics.mean(total["bytes"] for total, _, _ in each) / 1e6),
                "gigaflops": round_to(2 * statistics.mean(total["macs"] for total, _, _ in each) / 1e9),
                "score": round_to(statistics.mean(scores)),
                "low": round_to(min(scores)),
                "high": round_to(max(scores)),
                "seeds": len(each),
            }
            if timed:
                record["hours"] = round_to(statistics.mean(clock for _, _, clock in each) / 3600)
            records.append(record)
    return records


def _ends(runs: Runs) -> tuple[str, list[Record]]:
    """The last evaluation of every run and tier."""
    metric = metric_of(evaluated_rows(runs[0]))
    records: list[Record] = []
    for run in runs:
        tiers = {tier["name"]: tier for tier in run.setup.get("tiers", ())}
        end = evaluated_rows(run)[-1]
        for tier, scores in end["tiers"].items():
            known = {**tiers.get(tier, {}), **networks(run).get(tier, {})}
            records.append(
                {
                    "method": run.label,
                    **({"setting": run.setting} if run.setting else {}),
                    "tier": tier,
                    "width": known.get("width"),
                    "parameters": known.get("params"),
                    "seed": run.seed,
                    "score": round_to(percent(metric) * scores[metric]),
                }
            )
    return metric, records


def widths(runs: Runs) -> Panel:
    """How good the sub-model of each size is."""
    metric, records = _ends(runs)
    score = axis("score", named(metric), scale={"zero": False})
    mean = {**score, "aggregate": "mean"}
    views: dict[str, Any] = {}
    by_tier = axis("tier", "device class", "ordinal", sort=None)
    wide = axis("width", "width that the device can afford")
    choices = {"device class": by_tier}
    if all(record["width"] is not None for record in records):
        choices = {"width": wide, **choices}
    if all(record["parameters"] for record in records):
        choices["parameters"] = axis(
            "parameters", "parameters of the network that it runs", scale={"type": "log"}
        )
    for name, x in choices.items():
        views[name] = lines_and_points(x, mean, score)
    text = (
        "Lines are means over seeds, points single seeds, at the last evaluation. Some methods have one network for "
        "all: choose parameters to see what a device would have to run."
    )
    chart = Chart("width", f"{metric} against size", text, records, views, setting_filter(runs))
    return Panel("width", "What each size of device gets", charts=[chart])


def pareto(runs: Runs, per_cent: float | None) -> Panel:
    """What the target cost, in bytes and in FLOPs; nobody is better in both than a method on the front."""
    records: list[Record] = []
    goals: list[str] = []
    matched: list[Record] = []
    for setting, methods in by_setting(runs).items():
        results = {label: [evaluated_rows(run) for run in each] for label, each in methods.items()}
        metric, target = target_of(results, per_cent)
        at: Record = {"setting": setting} if setting else {}
        paired = {label: list(map(evaluated_rows, each)) for label, each in of_common_seeds(methods).items()}
        matched += [_matched({**at, **line}, metric) for line in accounting.matching(paired, metric)]
        if target is None:
            continue
        goals.append(shown(metric, target))
        costs = {k: v for k, v in costs_to_reach(results, target, metric).items() if v["reached"]}
        ends = {k: Spent(v["rounds"], v["macs"], v["bytes"], target) for k, v in costs.items()}
        front = accounting.pareto(ends)
        for label, cost in costs.items():
            record: Record = {"method": label, **at}
            record |= {"target": goals[-1], "megabytes": round_to(cost["bytes"] / 1e6)}
            record |= {"gigaflops": round_to(cost["flops"] / 1e9), "rounds": round_to(cost["rounds"])}
            record |= {"on the front": "yes" if label in front else "no", "seeds": cost["reached"]}
            records.append(record)
    caption = "Best figures, and what more it took to match the method above; below zero is a saving (mean over seeds)"
    tables = [(caption, matched)] if len(matched) > 1 else []
    if not records:
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
        "pareto", "FLOPs against bytes at the target", text, records, {"both": spec}, setting_filter(runs)
    )
    return Panel("pareto", "What the target costs", charts=[chart], tables=tables)


def _matched(line: Record, metric: str) -> Record:
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


def fairness(runs: Runs) -> Panel:
    """Who is left behind."""
    metric, ends = _ends(runs)
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for end in ends:
        key = end["method"], end.get("setting", "")
        groups.setdefault(key, {}).setdefault(end["tier"], []).append(end["score"])
    records: list[Record] = []
    for (label, setting), tiers in groups.items():
        means = {tier: statistics.mean(scores) for tier, scores in tiers.items()}
        worst, best = min(means.values()), max(means.values())
        for tier, mean in means.items():
            record: Record = {"method": label, **({"setting": setting} if setting else {})}
            record |= {
                "tier": tier,
                "score": round_to(mean),
                "worst": round_to(worst),
                "best": round_to(best),
            }
            records.append({**record, "gap": round_to(best - worst)})
    by_method = axis("method", "method", "nominal", axis={"labelAngle": 0, "labelLimit": 110})
    score = axis("score", named(metric), scale={"zero": False})
    reach = {"x": by_method, "y": {**score, "field": "worst"}, "y2": {"field": "best"}}
    dots = points(by_method, score, "tier")
    dots["encoding"] |= {
        "color": axis("tier", "device class", "ordinal", sort=None, scale={"scheme": "viridis"})
    }
    dots["encoding"]["shape"] = axis("tier", "device class", "nominal", sort=None)
    views = {
        "device classes": {
            "layer": [{"mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.4}, "encoding": reach}, dots],
            "height": 320,
        }
    }
    text = "One mark per device class, mean over seeds; the line goes from the worst served to the best served class."
    chart = Chart("fairness", f"{metric} of every device class", text, records, views, setting_filter(runs))
    return Panel("fairness", "Who is left behind", charts=[chart])


def covered(runs: Runs) -> Panel:
    """Which weights were trained by how many clients."""
    shares: list[Record] = []
    cells: list[Record] = []
    for setting, methods in by_setting(runs).items():
        for label, each in methods.items():
            counts = coverage(each[0])  # one seed: the map is about the method, not about chance
            at = {"method": label, **({"setting": setting} if setting else {}), "seed": each[0].seed}
            shares += [
                {**at, "layer": name, "never": round_to(s)} for name, s in never_trained(counts).items()
            ]
            cells += [{**at, **record} for record in map_records(counts)]
    if not cells:
        return Panel("coverage", "Which weights were trained")
    clients = axis("clients", "clients", scale={"scheme": "viridis", "reverse": True})
    inputs = axis("inputs", "inputs", "ordinal", sort={"field": "input"})
    outputs = axis("outputs", "outputs", "ordinal", sort={"field": "output"})
    charts = [
        Chart(
            "coverage", "Coverage map",
            "How many clients, over all rounds, trained the weights in each cell (mean of the cell). One seed.",
            cells, {"map": heat(inputs, outputs, clients)}, ("method", "layer", *setting_filter(runs)),
        )
    ]  # fmt: skip
    text = "Every weight of every layer was trained at least once, by every method."
    if any(record["never"] for record in shares):
        text = "Some weights were never trained: they keep their starting values."
        layer = axis("layer", "layer", "nominal", sort=None)
        never = bars(layer, axis("never", "never trained (%)", scale={"domain": [0, 100]}))
        told = "Per layer, the share of its (output, input) pairs that no client of any round held. One seed."
        title = "Weights that nobody ever trained"
        charts.insert(0, Chart("never-trained", title, told, shares, {"share": never}, setting_filter(runs)))
    return Panel("coverage", "Which weights were trained", text, charts)


def data(runs: Runs) -> Panel:
    """Who holds which classes."""
    records: list[Record] = []
    words: list[str] = []
    for setting, methods in by_setting(runs).items():
        found = next(iter(methods.values()))[0].setup.get("data", {})
        if "skew" in found:
            words.append(
                f"{setting + ': ' if setting else ''}{found['clients']} clients, {found['train_examples']} training "
                f"examples, label skew {found['skew']:.2f} (0: all alike, 1: nothing shared)."
            )
        for row in found.get("rows", ()):
            for label, count in enumerate(row["label_counts"]):
                at: Record = {"setting": setting} if setting else {}
                records.append({**at, "client": row["client"], "class": label, "examples": count})
    if not records:
        return Panel("data", "Who holds which data")
    value = axis("examples", "examples", scale={"scheme": "viridis", "reverse": True})
    spec = heat(axis("client", "client", "ordinal"), axis("class", "class", "ordinal"), value)
    text = "Examples of each class that each client trains on, in the first seed; all methods share it."
    chart = Chart(
        "data", "Examples per client and class", text, records, {"classes": spec}, setting_filter(runs)
    )
    return Panel("data", "Who holds which data", "\n".join(words), [chart])


def provenance(runs: Runs) -> Panel:
    """What was run, where, with which versions."""
    rows: list[Record] = []
    machines: dict[str, Record] = {}
    for run in runs:
        rows.append(
            {
                "method": run.label, **({"setting": run.setting} if run.setting else {}), "seed": run.seed,
                "state": run.state, "rounds": run.rows[-1]["round"], "folder": run.folder,
            }
        )  # fmt: skip
        flat = {key: value for key, value in run.environment.items() if not isinstance(value, Mapping)}
        flat |= {f"{name}": v for name, v in dict(run.environment.get("packages", {})).items()}
        machines[str(sorted(flat.items()))] = {key: str(value) for key, value in flat.items()}
    environment = [
        {"what": key, "value": value} for machine in machines.values() for key, value in machine.items()
    ]
    shared, own = _settings(runs)
    tables = [("Runs", rows), ("Settings that all runs share", shared)]
    tables += [("Settings in which runs differ", own)] if own else []
    return Panel("provenance", "What was run", tables=[*tables, ("Versions and machine", environment)])


def _settings(runs: Runs) -> tuple[list[Record], list[Record]]:
    each = [flat(run.config) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for settings in each for key in settings)
        if key not in ("name", "seed")
    ]
    shared = [key for key in keys if len({settings.get(key) for settings in each}) == 1]
    own: list[Record] = []
    for label in dict.fromkeys(run.label for run in runs):
        settings = each[next(place for place, run in enumerate(runs) if run.label == label)]
        own += [
            {"method": label, "setting": key, "value": settings[key]}
            for key in keys
            if key not in shared and key in settings
        ]
    return [{"setting": key, "value": each[0][key]} for key in shared], own
