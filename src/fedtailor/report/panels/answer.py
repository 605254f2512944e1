"""The first panel: which method, what it costs, and whether the difference can be trusted, in words and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedtailor.charts.grouping import Runs, by_setting, evaluated, named, networks, of_common_seeds, percent
from fedtailor.charts.panel import Panel, ReportedRun, Row
from fedtailor.record import Tiers
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
from fedtailor.report.panels.in_words import Sizes, best_in_words, doubted, target_in_words
from fedtailor.report.panels.ranking import ended, ranked
from fedtailor.report.rules import brought_along
from fedtailor.report.tables import shown, spread, totals
from fedtailor.report.targets import (
    REACHED,
    Records,
    Results,
    guessing,
    last_evaluation,
    mean_over_tiers,
    why_no_target,
)

MOST_KEYS = 4  # that are named of many


def answer(runs: Runs, per_cent: float | None) -> Panel:
    """Which method, what it costs, and whether the difference can be trusted; the best method first."""
    tables: list[tuple[str, Sequence[Row]]] = []
    sentences: list[str] = []
    for setting, found in by_setting(ended(runs)).items():
        results = {variant: list(map(evaluated, each)) for variant, each in found.items()}
        guess = guessing(next(iter(found.values()))[0].setup)
        metric, target = target_of(results, per_cent, guess)
        methods = {variant: found[variant] for variant in ranked(results, metric)}
        results = {variant: results[variant] for variant in methods}
        costs = costs_to_reach(results, target, metric) if target is not None else {}
        sizes = {variant: networks(each[0]) for variant, each in methods.items()}
        beyond = out_of_reach(
            results, {variant: allowed_by(each[0].setup) for variant, each in methods.items()}
        )
        common = of_common_seeds(methods)
        same_seeds = {name: list(map(evaluated, common.get(name, ()))) for name in methods}
        doubt = doubted(same_seeds, metric, next(iter(results)))
        caption = _caption("Results", setting, metric, results, any(beyond.values()))
        caption += "; a question mark: cannot be told from the first" if doubt else ""
        tables.append((caption, _result_rows(results, metric, beyond, doubt)))
        rule = f" To {shown(metric, target)}: {REACHED}" if target is not None else ""
        rule = rule or f" {why_no_target(results, metric, guess)}".rstrip()
        rows = [_cost_row(variant, results[variant], metric, target, costs, sizes) for variant in results]
        over = ", mean over seeds" if any(len(each) > 1 for each in results.values()) else ""
        tables.append((f"What it cost {setting}".strip() + f"{over}.{rule}", rows))
        words = best_in_words(results, same_seeds, metric, sizes)
        words += target_in_words(metric, target, costs)
        sentences += [f"With {setting}: {words[0]}" if setting else words[0], *words[1:]]
        best, compared, caution = _against_best(methods, same_seeds, metric)
        if compared:
            tables.append((f"Differences from {best} {setting}".strip(), compared))
        sentences += [*_unlike(methods), caution]
    sentences += [*_chosen(runs), *_no_numbers(runs), *_left_out(runs)]
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
    keys = [key for key in keys if not all(brought_along(key, each) for each in known)]
    if not keys:
        return []
    told = ", ".join(short_key(key, keys) for key in keys[:MOST_KEYS])
    more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
    return [
        f"These runs differ in more than their methods: {told}{more}. They stand side by side, but the best "
        "of them is not the best method."
    ]


def _chosen(runs: Runs) -> list[str]:
    """What ``auto`` took, and why."""
    found = {run.variant: run.setup.get("chosen", {}).get("why", "") for run in runs}
    return [f"{variant}: {why}." for variant, why in found.items() if why]


def _no_numbers(runs: Runs) -> list[str]:
    """Which runs have scores that are no numbers, because training blew up: charts leave such points out."""
    words = []
    for run in runs:
        found = [record for record in run.records if record.tiers]
        odd = [r.round for r in found if not all(map(math.isfinite, _scores(r.tiers)))]
        if odd:
            words.append(
                f"{run.variant}, seed {run.seed}: {len(odd)} of {len(found)} evaluations, the first after round "
                f"{odd[0]}, hold scores that are no numbers (NaN or infinity); charts leave them out."
            )
    return words[:MOST_KEYS]


def _scores(tiers: Tiers | None) -> Iterator[float]:
    return (value for scores in (tiers or {}).values() for value in scores.values())


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


def _result_rows(
    results: Results, metric: str, beyond: Mapping[str, Sequence[str]], doubt: Sequence[str]
) -> list[Row]:
    """The best first; places that seeds cannot tell have a question mark."""
    rows: list[Row] = []
    for place, (variant, runs) in enumerate(results.items(), start=1):
        ends = [last_evaluation(records) for records in runs]
        row: Row = {"method": variant}
        if len(results) > 1:
            row["place"] = f"{place}?" if variant in doubt or (doubt and place == 1) else place
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
        row[f"network of tier {first} (MACs)"] = short(sizes[variant][first]["macs"])
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


def _against_best(
    methods: Mapping[str, Sequence[ReportedRun]], same_seeds: Results, metric: str
) -> tuple[str, list[Row], str]:
    """The first method of the seeds that all have, every other one against it, and how far that can be trusted."""
    if len(methods) < 2:
        return "", [], ""
    if not any(same_seeds.values()):
        return "", [], "The methods share no seed: differences are not judged."
    left_out = any(len(same_seeds[variant]) < len(each) for variant, each in methods.items())
    best = ranked(same_seeds, metric)[0]
    ordered = {best: same_seeds[best]}
    ordered |= {variant: each for variant, each in same_seeds.items() if variant != best}
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
    caution = what_seeds_can_tell(len(same_seeds[best]), found.values(), percent(metric) > 1, best)
    if any(each.beyond_noise for tiers in by_tier.values() for each in tiers.values()):
        caution += " A star marks a tier's difference that is larger than noise among all tiers' (Holm)."
    caution += f" {best} was picked as the first by these same runs, which flatters it a little."
    return best, rows, caution + (" Differences are of the seeds that all methods have." if left_out else "")
