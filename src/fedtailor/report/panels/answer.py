"""The first panel: which method, what it costs, and whether the difference can be trusted, in words and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.charts.grouping import Runs, by_setting, evaluated, named, networks, of_common_seeds, percent
from fedtailor.charts.panel import Panel, ReportedRun, Row
from fedtailor.record import less_is_better
from fedtailor.report.amounts import short, size
from fedtailor.report.comparison import (
    costs_to_reach,
    differences,
    differences_by_tier,
    marked,
    out_of_reach,
    target_of,
    with_interval,
)
from fedtailor.report.differences import what_seeds_can_tell
from fedtailor.report.fairness import allowed_by
from fedtailor.report.likeness import NETWORK, differing, settings_of, short_key
from fedtailor.report.panels.ranking import ended, means, ranked
from fedtailor.report.tables import shown, spread, totals
from fedtailor.report.targets import REACHED, Records, Results, last_evaluation, mean_over_tiers

Sizes = Mapping[str, Mapping[str, int]]  # tier -> cost of the network that it runs
MOST_KEYS = 4  # that are named of many
SAME_SIZE = 1.2  # networks of one device class differ by rounding to whole channels


def answer(runs: Runs, per_cent: float | None) -> Panel:
    """Which method, what it costs, and whether the difference can be trusted; the best method first."""
    tables: list[tuple[str, Sequence[Row]]] = []
    sentences: list[str] = []
    for setting, found in by_setting(ended(runs)).items():
        results = {variant: list(map(evaluated, each)) for variant, each in found.items()}
        metric, target = target_of(results, per_cent)
        methods = {variant: found[variant] for variant in ranked(results, metric)}
        results = {variant: results[variant] for variant in methods}
        costs = costs_to_reach(results, target, metric) if target is not None else {}
        sizes = {variant: networks(each[0]) for variant, each in methods.items()}
        beyond = out_of_reach(
            results, {variant: allowed_by(each[0].setup) for variant, each in methods.items()}
        )
        caption = _caption("Results", setting, metric, results, any(beyond.values()))
        tables.append((caption, _result_rows(results, metric, beyond)))
        rule = f" To {shown(metric, target)}: {REACHED}" if target is not None else ""
        rows = [_cost_row(variant, results[variant], metric, target, costs, sizes) for variant in results]
        tables.append((f"What it cost {setting}".strip() + f", mean over seeds.{rule}", rows))
        sentences += _sentences(setting, results, metric, target, costs, sizes)
        compared, caution = _against_best(methods, metric)
        if compared:
            tables.append((f"Differences from the best {setting}".strip(), compared))
        sentences += [*_unlike(methods), caution]
    sentences += _left_out(runs)
    return Panel("answer", "The answer", "\n".join(filter(None, dict.fromkeys(sentences))), tables=tables)


def _caption(what: str, setting: str, metric: str, results: Results, beyond: bool) -> str:
    spread_over = ", mean ± deviation over seeds" if any(len(each) > 1 for each in results.values()) else ""
    brackets = "; (in brackets): more than the tier can run" if beyond else ""
    return f"{what} {setting}".strip() + f": {named(metric)} at the end{spread_over}{brackets}"


def _unlike(methods: Mapping[str, Sequence[ReportedRun]]) -> list[str]:
    """That runs which stand side by side differ in more than their methods, and in what."""
    first = [each[0] for each in methods.values()]
    known = [settings_of(run) for run in first]
    keys = [key for key in differing(first) if all(key in each for each in known) or key == NETWORK]
    keys = [key for key in keys if key.partition(".")[0] not in ("method", "training")]
    if not keys:
        return []
    told = ", ".join(short_key(key, keys) for key in keys[:MOST_KEYS])
    more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
    return [
        f"These runs differ in more than their methods: {told}{more}. They stand side by side, but the best "
        "of them is not the best method."
    ]


def _left_out(runs: Runs) -> list[str]:
    """Which runs do not count, or count as far as they came."""
    unfinished = [run for run in runs if run.state != "finished"]
    without = len(unfinished) - sum(run.state != "finished" for run in ended(runs))
    words = []
    if unfinished:
        words.append(f"{len(unfinished)} of {len(runs)} runs are not finished: ")
        words[0] += "their figures are those of their last evaluation" if without < len(unfinished) else ""
        words[0] += "; " if 0 < without < len(unfinished) else ""
        words[0] += (
            f"{without} are left out of final figures, which their finished seeds give" if without else ""
        )
        words[0] += "."
    repeats = [folder for run in runs for folder in run.repeats]
    if repeats:
        words.append(
            f"A seed counts once: {len(repeats)} of the folders repeat a run of the same settings and seed and are "
            f"left out ({', '.join(repeats[:MOST_KEYS])}{', ...' if len(repeats) > MOST_KEYS else ''})."
        )
    return words


def _result_rows(results: Results, metric: str, beyond: Mapping[str, Sequence[str]]) -> list[Row]:
    rows: list[Row] = []
    for place, (variant, runs) in enumerate(results.items(), start=1):
        ends = [last_evaluation(records) for records in runs]
        row: Row = {"method": variant, **({"place": place} if len(results) > 1 else {})}
        row["mean"] = spread(metric, [mean_over_tiers(end, metric) for end in ends])
        texts = {tier: spread(metric, [end[tier][metric] for end in ends]) for tier in ends[0]}
        row |= {f"tier {t}": f"({text})" if t in beyond[variant] else text for t, text in texts.items()}
        rows.append({**row, "seeds": len(runs)})
    return rows


def _cost_row(
    variant: str,
    runs: Sequence[Records],
    metric: str,
    target: float | None,
    costs: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, Sizes],
) -> Row:
    sums = [totals(records) for records in runs]
    row: Row = {"method": variant}
    first = next(iter(last_evaluation(runs[0])))
    if first in sizes[variant]:
        row[f"tier {first} runs"] = f"{short(sizes[variant][first]['macs'])} MACs"
    row["sent"] = size(statistics.mean(total["bytes_down"] + total["bytes_up"] for total in sums))
    row["FLOPs"] = short(2 * statistics.mean(total["macs"] for total in sums))
    if target is not None:
        cost = costs[variant]
        reached = bool(cost["reached"])
        goal = shown(metric, target)
        row[f"rounds to {goal}"] = f"{cost['rounds']:.3g}" if reached else "never"
        row[f"sent to {goal}"] = size(cost["bytes"]) if reached else "never"
        row[f"FLOPs to {goal}"] = short(cost["flops"]) if reached else "never"
        row["seeds that reach it alone"] = f"{cost['seeds_reached']} of {cost['seeds']}"
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
    ends = means(results, metric)
    best = next(iter(results))
    where = f"With {setting}: " if setting else ""
    words = [f"{where}Best {metric} over all device classes: {best}, {shown(metric, ends[best])}."]
    tiers = _common_tiers(results)
    if not tiers:
        words.append(
            "The methods were run on fleets that share no device class: compare their means with care."
        )
    for tier, what in ((tiers[0], "smallest"), (tiers[-1], "largest")) if tiers else ():
        there = {
            variant: statistics.mean(last_evaluation(records)[tier][metric] for records in runs)
            for variant, runs in results.items()
        }
        winner = max(there, key=lambda variant: sign * there[variant])
        words.append(f"Best on the {what} devices (tier {tier}): {winner}, {shown(metric, there[winner])}.")
        macs = {variant: each[tier]["macs"] for variant, each in sizes.items() if tier in each}
        if len(macs) == len(there) and macs[winner] > SAME_SIZE * min(macs.values()):
            fewest = min(macs.values())
            small = {variant: there[variant] for variant in there if macs[variant] <= SAME_SIZE * fewest}
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
    elif target is not None:
        words.append(f"No method reached {shown(metric, target)}.")
    return words


def _common_tiers(results: Results) -> list[str]:
    """The device classes that every run was evaluated for, the smallest first."""
    ends = [last_evaluation(records) for runs in results.values() for records in runs]
    return [tier for tier in ends[0] if all(tier in end for end in ends)]


def _against_best(methods: Mapping[str, Sequence[ReportedRun]], metric: str) -> tuple[list[Row], str]:
    """Every method against the best one, and how far that can be trusted."""
    if len(methods) < 2:
        return [], ""
    results = {variant: list(map(evaluated, each)) for variant, each in of_common_seeds(methods).items()}
    if not results:
        return [], "The methods share no seed: differences are not judged."
    left_out = any(len(results[variant]) < len(each) for variant, each in methods.items())
    best = ranked(results, metric)[0]
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
