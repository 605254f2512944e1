"""The first panel: which method, what it costs, and whether the difference can be trusted, in words and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.charts.grouping import Runs, by_setting, evaluated, networks, of_common_seeds, percent
from fedtailor.charts.panel import Panel, ReportedRun, Row
from fedtailor.record import less_is_better
from fedtailor.report.amounts import short, size
from fedtailor.report.comparison import (
    costs_to_reach,
    differences,
    differences_by_tier,
    marked,
    target_of,
    with_interval,
)
from fedtailor.report.differences import what_seeds_can_tell
from fedtailor.report.tables import shown, spread, totals
from fedtailor.report.targets import Records, Results, last_evaluation, mean_over_tiers

Sizes = Mapping[str, Mapping[str, int]]  # tier -> cost of the network that it runs
SAME_SIZE = 1.2  # networks of one device class differ by rounding to whole channels


def answer(runs: Runs, per_cent: float | None) -> Panel:
    """Which method, what it costs, and whether the difference can be trusted."""
    tables: list[tuple[str, Sequence[Row]]] = []
    sentences: list[str] = []
    for setting, methods in by_setting(runs).items():
        results = {variant: list(map(evaluated, each)) for variant, each in methods.items()}
        metric, target = target_of(results, per_cent)
        costs = costs_to_reach(results, target, metric) if target is not None else {}
        sizes = {variant: networks(each[0]) for variant, each in methods.items()}
        rows = [
            _answer_row(variant, results[variant], metric, target, costs.get(variant), sizes[variant])
            for variant in results
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
    variant: str,
    runs: Sequence[Records],
    metric: str,
    target: float | None,
    cost: Mapping[str, Any] | None,
    sizes: Sizes,
) -> Row:
    sums = [totals(records) for records in runs]
    ends = [last_evaluation(records) for records in runs]
    row: Row = {"method": variant, "seeds": len(runs)}
    row["mean"] = spread(metric, [mean_over_tiers(end, metric) for end in ends])
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
        row["seeds that reached it"] = f"{cost['seeds_reached']} of {cost['seeds']}"
    return row


def _sentences(
    setting: str,
    results: Results,
    metric: str,
    target: float | None,
    costs: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, Sizes],
) -> list[str]:
    """In words, the method that is best first."""
    sign = -1 if less_is_better(metric) else 1
    ends = _means(results, metric)
    best = _best(results, metric)
    where = f"With {setting}: " if setting else ""
    words = [f"{where}Best {metric} over all device classes: {best}, {shown(metric, ends[best])}."]
    tiers = _common_tiers(results)
    if not tiers:
        words.append(
            "The methods were run on fleets that share no device class: compare their means with care."
        )
    for tier, what in ((tiers[0], "smallest"), (tiers[-1], "largest")) if tiers else ():
        means = {
            variant: statistics.mean(last_evaluation(records)[tier][metric] for records in runs)
            for variant, runs in results.items()
        }
        winner = max(means, key=lambda variant: sign * means[variant])
        words.append(f"Best on the {what} devices (tier {tier}): {winner}, {shown(metric, means[winner])}.")
        macs = {variant: each[tier]["macs"] for variant, each in sizes.items() if tier in each}
        if len(macs) == len(means) and macs[winner] > SAME_SIZE * min(macs.values()):
            fewest = min(macs.values())
            small = {variant: means[variant] for variant in means if macs[variant] <= SAME_SIZE * fewest}
            fitting = max(small, key=lambda variant: sign * small[variant])
            words[-1] += (
                f" It gives them a network of {short(macs[winner])} MACs, {macs[winner] / fewest:.3g} times the "
                "smallest; "
                f"of the smallest networks the best is that of {fitting}, {shown(metric, small[fitting])}."
            )
    reached = {variant: cost for variant, cost in costs.items() if cost["reached"]}
    if target is not None and reached:
        least = min(reached, key=lambda variant: reached[variant]["bytes"])
        cheap = min(reached, key=lambda variant: reached[variant]["flops"])
        words.append(
            f"To reach {shown(metric, target)}, {least} sends least ({size(reached[least]['bytes'])}) and "
            f"{cheap} computes least ({short(reached[cheap]['flops'])} FLOPs)."
        )
    return words


def _common_tiers(results: Results) -> list[str]:
    """The device classes that every run was evaluated for, the smallest first."""
    ends = [last_evaluation(records) for runs in results.values() for records in runs]
    return [tier for tier in ends[0] if all(tier in end for end in ends)]


def _means(results: Results, metric: str) -> dict[str, float]:
    """Of every method: the mean over tiers at the end, over seeds."""
    return {
        variant: statistics.mean(mean_over_tiers(last_evaluation(records), metric) for records in runs)
        for variant, runs in results.items()
    }


def _best(results: Results, metric: str) -> str:
    sign, means = -1 if less_is_better(metric) else 1, _means(results, metric)
    return max(means, key=lambda variant: sign * means[variant])


def _against_best(methods: Mapping[str, Sequence[ReportedRun]], metric: str) -> tuple[list[Row], str]:
    """Every method against the best one, and how far that can be trusted."""
    if len(methods) < 2:
        return [], ""
    results = {variant: list(map(evaluated, each)) for variant, each in of_common_seeds(methods).items()}
    if not results:
        return [], "The methods share no seed: differences are not judged."
    left_out = any(len(results[variant]) < len(each) for variant, each in methods.items())
    best = _best(results, metric)
    ordered = {best: results[best], **{variant: each for variant, each in results.items() if variant != best}}
    found, by_tier = differences(ordered, metric), differences_by_tier(ordered, metric)
    rows = [
        {
            "method": variant,
            f"{metric} against {best}": with_interval(metric, each),
            "verdict": each.verdict,
            **{f"tier {tier}": marked(metric, one).strip() for tier, one in by_tier[variant].items()},
        }
        for variant, each in found.items()
    ]
    caution = what_seeds_can_tell(len(results[best]), found.values(), points=percent(metric) > 1)
    caution += " A star marks a tier's difference that is larger than noise among all tiers' (Holm)."
    caution += " The best was picked by these same runs, which flatters it a little."
    return rows, caution + (" Differences are of the seeds that all methods have." if left_out else "")
