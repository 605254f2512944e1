"""The first panel: which method, what it costs, and whether the difference can be trusted, in words and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.charts.grouping import Runs, by_setting, evaluated_rows, networks, of_common_seeds
from fedtailor.charts.panel import Panel, Record, RunRecord
from fedtailor.record import less_is_better
from fedtailor.report.comparison import costs_to_reach, differences, target_of, with_interval
from fedtailor.report.differences import what_seeds_can_tell
from fedtailor.report.tables import shown, spread, totals
from fedtailor.report.targets import mean_over_tiers
from fedtailor.report.units import short, size

Sizes = Mapping[str, Mapping[str, int]]  # tier -> cost of the network that it runs
SAME_SIZE = 1.2  # networks of one device class differ by rounding to whole channels


def answer(runs: Runs, per_cent: float | None) -> Panel:
    """Which method, what it costs, and whether the difference can be trusted."""
    tables: list[tuple[str, Sequence[Record]]] = []
    sentences: list[str] = []
    for setting, methods in by_setting(runs).items():
        results = {label: [evaluated_rows(run) for run in each] for label, each in methods.items()}
        metric, target = target_of(results, per_cent)
        costs = costs_to_reach(results, target, metric) if target is not None else {}
        sizes = {label: networks(each[0]) for label, each in methods.items()}
        rows = [
            _answer_row(label, results[label], metric, target, costs.get(label), sizes[label])
            for label in results
        ]
        tables.append((f"Results {setting}".strip(), rows))
        sentences += _sentences(setting, results, metric, target, costs, sizes)
        compared, caution = _against_best(methods, metric)
        if compared:
            tables.append((f"Differences from the best {setting}".strip(), compared))
        sentences.append(caution)
    unfinished = [run for run in runs if run.state != "finished"]
    if unfinished:
        sentences.append(
            f"{len(unfinished)} of {len(runs)} runs are not finished: their figures are those of their last evaluation."
        )
    return Panel("answer", "The answer", "\n".join(filter(None, dict.fromkeys(sentences))), tables=tables)


def _answer_row(
    label: str,
    results: Sequence[Sequence[Mapping[str, Any]]],
    metric: str,
    target: float | None,
    cost: Mapping[str, Any] | None,
    sizes: Sizes,
) -> Record:
    sums = [totals(rows) for rows in results]
    ends = [rows[-1]["tiers"] for rows in results]
    row: Record = {"method": label, "seeds": len(results)}
    row["mean"] = spread(metric, [mean_over_tiers(rows[-1], metric) for rows in results])
    row.update({f"tier {tier}": spread(metric, [end[tier][metric] for end in ends]) for tier in ends[0]})
    first = next(iter(ends[0]))
    if first in sizes:
        row[f"tier {first} runs"] = f"{short(sizes[first]['macs'])} MACs"
    row["sent"] = size(statistics.mean(total["bytes_down"] + total["bytes_up"] for total in sums))
    row["FLOPs"] = short(2 * statistics.mean(total["macs"] for total in sums))
    if target is not None and cost is not None:
        reached = bool(cost["reached"])
        goal = shown(metric, target)
        row[f"rounds to {goal}"] = f"{cost['rounds']:.3g}" if reached else "never"
        row[f"sent to {goal}"] = size(cost["bytes"]) if reached else "never"
        row[f"FLOPs to {goal}"] = short(cost["flops"]) if reached else "never"
        row["seeds that reached it"] = f"{cost['reached']} of {cost['seeds']}"
    return row


def _sentences(
    setting: str,
    results: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    metric: str,
    target: float | None,
    costs: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, Sizes],
) -> list[str]:
    """In words, the method that is best first."""
    sign = -1 if less_is_better(metric) else 1
    ends = {
        label: statistics.mean(mean_over_tiers(rows[-1], metric) for rows in each)
        for label, each in results.items()
    }
    best = _best(results, metric)
    where = f"With {setting}: " if setting else ""
    words = [f"{where}Best {metric} over all device classes: {best}, {shown(metric, ends[best])}."]
    for place, what in (("low", "smallest"), ("high", "largest")):
        tiers = list(next(iter(results.values()))[0][-1]["tiers"])
        tier = tiers[0] if place == "low" else tiers[-1]
        means = {
            label: statistics.mean(rows[-1]["tiers"][tier][metric] for rows in each)
            for label, each in results.items()
        }
        winner = max(means, key=lambda label: sign * means[label])
        words.append(f"Best on the {what} devices (tier {tier}): {winner}, {shown(metric, means[winner])}.")
        macs = {label: each[tier]["macs"] for label, each in sizes.items() if tier in each}
        if len(macs) == len(means) and macs[winner] > SAME_SIZE * min(macs.values()):
            fewest = min(macs.values())
            small = {label: means[label] for label in means if macs[label] <= SAME_SIZE * fewest}
            fitting = max(small, key=lambda label: sign * small[label])
            words[-1] += (
                f" It gives them a network of {short(macs[winner])} MACs, {macs[winner] / fewest:.3g} times the "
                "smallest; "
                f"of the smallest networks the best is that of {fitting}, {shown(metric, small[fitting])}."
            )
    reached = {label: cost for label, cost in costs.items() if cost["reached"]}
    if target is not None and reached:
        least = min(reached, key=lambda label: reached[label]["bytes"])
        cheap = min(reached, key=lambda label: reached[label]["flops"])
        words.append(
            f"To reach {shown(metric, target)}, {least} sends least ({size(reached[least]['bytes'])}) and "
            f"{cheap} computes least ({short(reached[cheap]['flops'])} FLOPs)."
        )
    return words


def _best(results: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], metric: str) -> str:
    sign = -1 if less_is_better(metric) else 1
    ends = {
        label: sign * statistics.mean(mean_over_tiers(rows[-1], metric) for rows in each)
        for label, each in results.items()
    }
    return max(ends, key=lambda label: ends[label])


def _against_best(methods: Mapping[str, Sequence[RunRecord]], metric: str) -> tuple[list[Record], str]:
    """Every method against the best one, and how far that can be trusted."""
    if len(methods) < 2:
        return [], ""
    results = {label: list(map(evaluated_rows, each)) for label, each in of_common_seeds(methods).items()}
    if not results:
        return [], "The methods share no seed: differences are not judged."
    left_out = any(len(results[label]) < len(each) for label, each in methods.items())
    best = _best(results, metric)
    ordered = {best: results[best], **{label: each for label, each in results.items() if label != best}}
    found = differences(ordered, metric)
    rows = [
        {"method": label, f"{metric} against {best}": with_interval(metric, each), "verdict": each.verdict}
        for label, each in found.items()
    ]
    caution = what_seeds_can_tell(len(results[best]), len(found))
    caution += " The best was picked by these same runs, which flatters it a little."
    return rows, caution + (" Differences are of the seeds that all methods have." if left_out else "")
