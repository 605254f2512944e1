"""How good runs are: against what they spent, by size of device, and who is left behind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedtailor.charts.grouping import (
    Runs,
    by_setting,
    named,
    networks,
    percent,
    round_to,
    setting_filter,
)
from fedtailor.charts.panel import (
    AMOUNTS,
    ROUNDS,
    Chart,
    Panel,
    Row,
    Spec,
    axis,
    lines,
    lines_and_points,
    spans,
)
from fedtailor.record import Spent, Tiers, headline
from fedtailor.report.targets import (
    is_simulated,
    last_evaluation,
    mean_over_tiers,
    simulated_until,
    spent_until,
)

ALL = "all"  # the mean over device classes
BROKEN = r"split(replace(datum.label, /:/g, ':\n'), '\n')"  # a method's settings below its name
WIDTHS = ".3~g"  # 0.125, 0.25, 1
ONCE = (
    "Every run was evaluated once, after its last round, so that there is no course to show. The setting "
    'evaluate_every says how often; "auto" keeps evaluations below a tenth of the work, which is one in a short run.'
)
AXES = {
    "rounds": ROUNDS,
    "bytes sent": axis("bytes", "bytes sent, down and up", axis=AMOUNTS),
    "FLOPs": axis("FLOPs", "FLOPs of all clients", axis=AMOUNTS),
}

CLOCK = {"simulated time": axis("hours", "simulated hours")}


def progress(runs: Runs) -> Panel:
    """Accuracy against what was spent."""
    metrics = _metrics(runs)
    rows: list[Row] = []
    for setting, methods in by_setting(runs).items():
        for variant, each in methods.items():
            rows += _curve(setting, variant, each, metrics[setting])
    if max(Counter((row["method"], row.get("setting"), row["tier"]) for row in rows).values()) < 2:
        return Panel("progress", "How it was reached", _evaluated_once(runs))
    score = _score(metrics)
    axes = {**AXES, **(CLOCK if all(is_simulated(run.records) for run in runs) else {})}
    views = {name: lines(x, score, low="low", high="high") for name, x in axes.items()}
    text = (
        "Mean over seeds; the band goes from the worst to the best seed. 'all' is the mean over device classes. "
        "Costs are those of all clients together, for training and for measuring."
    )
    chart = Chart(
        "progress",
        f"{_told(metrics)} against what was spent",
        text,
        rows,
        views,
        ("tier", *setting_filter(runs)),
    )
    return Panel("progress", "How it was reached", charts=[chart])


def _evaluated_once(runs: Runs) -> str:
    """Why there is no curve, of runs with one evaluation each."""
    if all(run.state == "finished" for run in runs):
        return ONCE
    return "There is one evaluation so far; a second one begins the chart."


def _metrics(runs: Runs) -> dict[str, str]:
    """Setting -> the metric that all its runs are judged by."""
    return {
        setting: headline(last_evaluation(next(iter(methods.values()))[0].records))
        for setting, methods in by_setting(runs).items()
    }


def _told(metrics: Mapping[str, str]) -> str:
    return " or ".join(dict.fromkeys(metrics.values()))


def _score(metrics: Mapping[str, str]) -> Spec:
    return axis("score", " or ".join(dict.fromkeys(map(named, metrics.values()))), scale={"zero": False})


def _curve(setting: str, variant: str, runs: Runs, metric: str) -> list[Row]:
    """One row per evaluated round and tier, joined over seeds."""
    factor = percent(metric)
    seen: dict[int, list[tuple[Spent, float, Tiers]]] = {}
    for run in runs:
        until = zip(run.records, spent_until(run.records), simulated_until(run.records), strict=True)
        for record, spent, time in until:
            if record.tiers:
                seen.setdefault(record.round, []).append((spent, time / 3600, record.tiers))
    rows: list[Row] = []
    for round, each in sorted(seen.items()):
        for tier in (ALL, *each[0][2]):
            scores = [
                factor * (mean_over_tiers(tiers, metric) if tier == ALL else tiers[tier][metric])
                for _, _, tiers in each
            ]
            rows.append(
                {
                    "method": variant,
                    **({"setting": setting} if setting else {}),
                    "tier": tier,
                    "rounds": round,
                    "bytes": round_to(statistics.mean(spent.bytes for spent, _, _ in each)),
                    "FLOPs": round_to(2 * statistics.mean(spent.macs for spent, _, _ in each)),
                    "hours": round_to(statistics.mean(hours for _, hours, _ in each)),
                    "score": round_to(statistics.mean(scores)),
                    "low": round_to(min(scores)),
                    "high": round_to(max(scores)),
                    "seeds": len(each),
                }
            )
    return rows


def _ends(runs: Runs, metrics: Mapping[str, str]) -> list[Row]:
    """The last evaluation of every run and tier."""
    rows: list[Row] = []
    for run in runs:
        metric = metrics[run.setting]
        tiers = {tier["name"]: tier for tier in run.setup.get("tiers", ())}
        for tier, scores in last_evaluation(run.records).items():
            known = {**tiers.get(tier, {}), **networks(run).get(tier, {})}
            rows.append(
                {
                    "method": run.variant,
                    **({"setting": run.setting} if run.setting else {}),
                    "tier": tier,
                    "width": known.get("width"),
                    **({"depth": known["depth"]} if "depth" in known else {}),
                    "parameters": known.get("params"),
                    "seed": run.seed,
                    "score": round_to(percent(metric) * scores[metric]),
                }
            )
    return rows


def widths(runs: Runs) -> Panel:
    """How good the sub-model of each size is."""
    metrics = _metrics(runs)
    rows, score = _ends(runs, metrics), _score(metrics)
    mean = {**score, "aggregate": "mean"}
    views: dict[str, Any] = {}
    by_tier = axis("tier", "device class", "ordinal", sort=None)
    known = sorted({row["width"] for row in rows if row["width"] is not None})
    wide = axis("width", "width that the device can afford", axis={"values": known, "format": WIDTHS})
    choices = {"device class": by_tier}
    if all(row["width"] is not None for row in rows):
        choices = {"width": wide, **choices}
    if all("depth" in row for row in rows):
        deep = sorted({row["depth"] for row in rows})
        choices["depth"] = axis(
            "depth", "share of the blocks that it runs", axis={"values": deep, "format": WIDTHS}
        )
    if all(row["parameters"] for row in rows):
        choices["parameters"] = axis(
            "parameters", "parameters of the network that it runs", scale={"type": "log"}
        )
    for name, x in choices.items():
        views[name] = lines_and_points(x, mean, score)
    text = (
        "Lines are means over seeds, points single seeds, at the last evaluation. Some methods have one network for "
        "all: choose parameters to see what a device would have to run."
    )
    chart = Chart("width", f"{_told(metrics)} against size", text, rows, views, setting_filter(runs))
    return Panel("width", "What each size of device gets", charts=[chart])


def left_behind(runs: Runs) -> Panel:
    """Who is left behind."""
    metrics = _metrics(runs)
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for end in _ends(runs, metrics):
        key = end["method"], end.get("setting", "")
        groups.setdefault(key, {}).setdefault(end["tier"], []).append(end["score"])
    rows: list[Row] = []
    for (variant, setting), tiers in groups.items():
        means = {tier: statistics.mean(scores) for tier, scores in tiers.items()}
        worst, best = min(means.values()), max(means.values())
        for tier, mean in means.items():
            row: Row = {"method": variant, **({"setting": setting} if setting else {})}
            row |= {
                "tier": tier,
                "score": round_to(mean),
                "worst": round_to(worst),
                "best": round_to(best),
            }
            rows.append({**row, "gap": round_to(best - worst)})
    by_method = axis("method", "method", "nominal", sort=None, axis={"labelExpr": BROKEN, "title": None})
    lines = max(Counter(row.get("setting") for row in rows).values())
    longest = max(len(str(row["tier"])) for row in rows)
    score = _score(metrics)
    score["scale"] |= {"padding": min(8 + 7 * longest, 120)}  # pixels, for the names beside the marks
    views = {"device classes": spans(score, by_method, "tier", ("worst", "best"), lines)}
    text = "One mark per device class, mean over seeds; the band goes from the worst served to the best served class."
    chart = Chart(
        "left-behind", f"{_told(metrics)} of every device class", text, rows, views, setting_filter(runs)
    )
    return Panel("left-behind", "Who is left behind", charts=[chart])
