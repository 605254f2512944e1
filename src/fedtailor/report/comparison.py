"""Methods side by side: means over seeds, what a target cost, and which differences are more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtailor.charts.grouping import percent
from fedtailor.charts.terminal import Titled, Words, table_of_methods
from fedtailor.record import headline, less_is_better
from fedtailor.report.accounting import matching
from fedtailor.report.amounts import short, size
from fedtailor.report.differences import Difference, gained, judged, paired, what_seeds_can_tell
from fedtailor.report.fairness import Allowed, cannot_run, fairness_data
from fedtailor.report.tables import comparison_rows, comparison_table, shown, totals
from fedtailor.report.targets import (
    REACHED,
    Results,
    common_target,
    cost_to_reach,
    last_evaluation,
    mean_over_tiers,
    why_no_target,
)


def target_of(
    results: Results, per_cent: float | None, guess: float | None = None
) -> tuple[str, float | None]:
    """The metric that methods are judged by, and the value to reach: given, or one that most methods reach.

    A method that stands alone would be measured by itself: it has no target but a given one.
    """
    metric = headline(last_evaluation(next(iter(results.values()))[0]))
    if per_cent is None:
        return metric, common_target(results, metric, guess) if len(results) > 1 else None
    return metric, per_cent / percent(metric)


def costs_to_reach(results: Results, target: float, metric: str) -> dict[str, dict[str, Any]]:
    """For each method whether its mean over seeds reached the target, at what cost, and how many seeds did alone."""
    answer: dict[str, dict[str, Any]] = {}
    for method, runs in results.items():
        cost = cost_to_reach(runs, target, metric)
        alone = sum(cost_to_reach([records], target, metric) is not None for records in runs)
        answer[method] = {"reached": cost is not None, "seeds_reached": alone, "seeds": len(runs)}
        answer[method] |= {**cost, "flops": 2 * cost["macs"]} if cost is not None else {}
    return answer


def differences(results: Results, metric: str) -> dict[str, Difference]:
    """Every method against the first one: the mean over tiers at the end, paired by seed, judged together."""
    ends = {
        method: [mean_over_tiers(last_evaluation(records), metric) for records in runs]
        for method, runs in results.items()
    }
    first, *others = ends
    return judged({method: paired(ends[first], ends[method]) for method in others})


def differences_by_tier(results: Results, metric: str) -> dict[str, dict[str, Difference]]:
    """The same tier by tier: method -> tier; all of them are judged together."""
    ends = {method: [last_evaluation(records) for records in runs] for method, runs in results.items()}
    first, *others = ends
    tiers = [tier for tier in ends[first][0] if all(tier in end for runs in ends.values() for end in runs)]
    family = {
        (method, tier): paired(
            [end[tier][metric] for end in ends[first]], [end[tier][metric] for end in ends[method]]
        )
        for method in others
        for tier in tiers
    }
    found = judged(family)
    return {method: {tier: found[method, tier] for tier in tiers} for method in others}


def _plain(found: Difference) -> dict[str, Any]:
    return {
        "mean": found.mean,
        "deviation": found.deviation,
        "half_width": found.half_width,
        "chance": found.chance,
        "beyond_noise": found.beyond_noise,
        "verdict": found.verdict,
    }


def comparison_data(
    results: Results, per_cent: float | None = None, guess: float | None = None
) -> dict[str, Any]:
    """All of it as plain data; ``guess``: the accuracy of guessing."""
    metric, target = target_of(results, per_cent, guess)
    answer: dict[str, Any] = {"methods": comparison_rows(results), "metric": metric, "target": target}
    if target is None and (why := why_no_target(results, metric, guess)):
        answer["no_target"] = why
    if target is not None:
        answer["to_target"] = costs_to_reach(results, target, metric)
    answer["matching"] = matching(results, metric)
    by_tier = differences_by_tier(results, metric)
    answer["differences"] = {
        "against": next(iter(results)),
        "methods": {
            method: {**_plain(found), "tiers": {tier: _plain(each) for tier, each in by_tier[method].items()}}
            for method, found in differences(results, metric).items()
        },
    }
    return answer


@dataclass(frozen=True)
class Known:
    """What is known of a comparison beside its records."""

    allowed: Mapping[str, Allowed] = field(default_factory=dict)  # what budgets allow, for each method
    guess: float | None = None  # the accuracy of guessing
    kept_back: int = 0  # validation examples
    narrower: Sequence[
        str
    ] = ()  # a sentence for each method that trains none of the widths that tiers may have
    statistics: bool = True  # whether a norm policy changes anything
    chosen: Sequence[str] = ()  # what ``auto`` took, and why


def comparison_tables(
    title: str, results: Results, per_cent: float | None = None, known: Known | None = None
) -> Iterator[Titled | Words]:
    """For a terminal."""
    known = known or Known()
    metric, target = target_of(results, per_cent, known.guess)
    yield comparison_table(title, results, out_of_reach(results, known.allowed))
    yield _cost_table(results, target, metric, known.guess)
    if len(results) > 1:
        yield from _difference_table(results, metric)
    if known.kept_back:
        yield Words(kept_back_in_words(known.kept_back))
    yield from (Words(f"{sentence}.") for sentence in known.chosen)


def kept_back_in_words(count: int) -> str:
    """That training had fewer examples, in every run alike."""
    return (
        f"Every run kept {count:,} training examples of its clients back as validation examples, to choose by; the "
        "figures are of test examples."
    )


def unequal_in_words(results: Results, known: Known) -> Iterator[Words]:
    """Budgets that were not the same for all, and why where that is known; nothing where they were."""
    found = fairness_data(results, known.allowed, known.narrower)
    if found["unequal"]:
        yield Words("Unequal budgets, per client and round:")
    for sentence in found["unequal"]:
        yield Words(f"  {sentence}")
    yield from map(Words, found["narrower"])
    if found["not_recorded"]:
        names = ", ".join(found["not_recorded"])
        yield Words(f"Budgets are not compared for runs of an earlier version: {names}")


def out_of_reach(results: Results, allowed: Mapping[str, Allowed]) -> dict[str, list[str]]:
    """For each method the tiers that cannot run what they were evaluated on."""
    return {method: cannot_run(runs, allowed.get(method, {})) for method, runs in results.items()}


def gains_and_losses(results: Results, allowed: Mapping[str, Allowed]) -> Iterator[str]:
    """In words: what every tier gains and loses with the first method instead of each of the others.

    What is not larger than noise, by the verdicts of ``differences_by_tier``, is not called so.
    """
    first, *others = results
    ends = {method: [last_evaluation(records) for records in runs] for method, runs in results.items()}
    beyond, metric = out_of_reach(results, allowed), headline(ends[first][0])
    factor, unit = percent(metric), " points" if percent(metric) > 1 else ""
    words = ("better", "worse") if less_is_better(metric) else ("higher", "lower")
    factor = -factor if less_is_better(metric) else factor
    verdicts = differences_by_tier(results, metric)
    for other in others:
        yield f"With {first} instead of {other}{'' if metric == 'accuracy' else f' ({metric})'}:"
        tiers = list(verdicts[other])
        served = [tier for tier in tiers if tier in beyond[other] and tier not in beyond[first]]
        if served:
            yield f"  {', '.join(served)}: a network that fits, where {other} has none"
        for tier in tiers:
            if tier in (*beyond[first], *beyond[other]):
                continue
            pairs = zip(ends[first], ends[other], strict=True)
            values = [factor * (a[tier][metric] - b[tier][metric]) for a, b in pairs]
            yield f"  {tier}: {gained(values, verdicts[other][tier], unit, words)}"


def _cost_table(results: Results, target: float | None, metric: str, guess: float | None) -> Titled:
    costs = costs_to_reach(results, target, metric) if target is not None else {}
    title, caption = "Cost in all", "One multiply-accumulate is two FLOPs."
    goal = ""
    if target is not None:
        goal = shown(metric, target)
        title, caption = f"Cost in all, and until {metric} {goal} was reached", REACHED
    elif why := why_no_target(results, metric, guess):
        caption = f"{caption} {why}"
    table = table_of_methods(results)
    for column in ("FLOPs\nin all", "time\nin all"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("rounds", "sent", "FLOPs", "seeds") if costs else ():
        table.add_column(f"{column}\nto {goal}", justify="right", no_wrap=True)
    for method, runs in results.items():
        sums = [totals(records) for records in runs]
        cells = [short(2 * statistics.mean(total["macs"] for total in sums))]
        cells.append(f"{statistics.mean(total['seconds'] for total in sums):.0f} s")
        cost = costs.get(method)
        if cost is not None and cost["reached"]:
            cells += [f"{cost['rounds']:.3g}", size(cost["bytes"]), short(cost["flops"])]
        elif cost is not None:
            cells += ["never", "-", "-"]
        cells += [f"{cost['seeds_reached']} of {cost['seeds']}"] if cost is not None else []
        table.add_row(method, *cells)
    return Titled(title, table, caption)


def _difference_table(results: Results, metric: str) -> Iterator[Titled | Words]:
    first = next(iter(results))
    table = table_of_methods(results)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    found = differences(results, metric)
    for method, difference in found.items():
        table.add_row(method, with_interval(metric, difference), difference.verdict)
    yield Titled(f"Against {first}: {metric}, mean over tiers, same seeds", table)
    by_tier = differences_by_tier(results, metric)
    tiers = list(next(iter(by_tier.values())))
    if len(tiers) > 1:
        yield _tier_table(first, tiers, by_tier, metric)
    points = percent(metric) > 1
    yield Words(what_seeds_can_tell(len(results[first]), found.values(), points, first))


def _tier_table(
    first: str, tiers: Sequence[str], by_tier: Mapping[str, Mapping[str, Difference]], metric: str
) -> Titled:
    table = table_of_methods(by_tier)
    for tier in tiers:
        table.add_column(tier, justify="right", no_wrap=True)
    for method, each in by_tier.items():
        table.add_row(method, *(marked(metric, each[tier]) for tier in tiers))
    told = any(each.beyond_noise for tiers_of in by_tier.values() for each in tiers_of.values())
    caption = "None of these differences can be told from noise."
    if told:
        caption = "* larger than noise, of all differences in this table (Holm)"
    unit = " in points" if percent(metric) > 1 else ""
    return Titled(f"Against {first}, tier by tier: {metric}{unit}", table, caption)


def marked(metric: str, difference: Difference) -> str:
    """``+1.2*``: the mean in points, with a star where it is larger than noise."""
    factor = percent(metric)
    text = f"{factor * difference.mean:+.{1 if factor > 1 else 3}f}"
    return f"{text}{'*' if difference.beyond_noise else ' '}"


def with_interval(metric: str, difference: Difference) -> str:
    """``+1.2 ± 0.8 points``: the mean and its 95 % interval, where that says anything."""
    factor = percent(metric)
    unit, digits = (" points", 2) if factor > 1 else ("", 4)
    text = f"{factor * difference.mean:+.{digits}f}"
    half = difference.interval
    if half is not None and unit and half >= 1:  # no difference of shares is larger
        text += " ± over 100"
    elif half is not None:
        text += f" ± {factor * half:.{digits}f}"
    return text + unit
