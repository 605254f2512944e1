"""The answer in words: which method is best, whether that can be told from noise, what the target costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.record import less_is_better
from fedtailor.report.amounts import short, size
from fedtailor.report.comparison import differences, differences_by_tier
from fedtailor.report.differences import ENOUGH_SEEDS, not_told
from fedtailor.report.panels.ranking import means
from fedtailor.report.tables import shown
from fedtailor.report.targets import Results, last_evaluation

Sizes = Mapping[str, Mapping[str, int]]  # tier -> cost of the network that it runs
Costs = Mapping[str, Mapping[str, Any]]  # method -> what a target cost it
SAME_SIZE = 1.2  # networks of one device class differ by rounding to whole channels
MOST_NAMES = 3  # of methods in a sentence


def doubted(same_seeds: Results, metric: str, winner: str, tier: str | None = None) -> list[str]:
    """The methods that the winner cannot be told from, overall or at one tier; all of them where no seed is common."""
    others = {name: runs for name, runs in same_seeds.items() if name != winner}
    if not others or not any(same_seeds.values()):
        return list(others)
    ordered = {winner: same_seeds[winner], **others}
    found = differences(ordered, metric)
    if tier is not None:
        found = {name: each[tier] for name, each in differences_by_tier(ordered, metric).items()}
    return not_told(found, -1 if less_is_better(metric) else 1)


def best_in_words(
    results: Results, same_seeds: Results, metric: str, sizes: Mapping[str, Sizes]
) -> list[str]:
    """Which method is best overall, on the smallest and on the largest devices; of one method its figures."""
    ends, best = means(results, metric), next(iter(results))
    if len(results) == 1:
        return _alone(results, metric)
    words = [_winner(same_seeds, metric, best, ends[best])]
    tiers = _common_tiers(results)
    if not tiers:
        words.append(
            "The methods were run on fleets that share no device class: compare their means with care."
        )
    sign = -1 if less_is_better(metric) else 1
    for tier, what in _outermost(tiers):
        there = _at(results, metric, tier)
        winner = max(there, key=lambda variant: sign * there[variant])
        words.append(_winner(same_seeds, metric, winner, there[winner], (tier, what)))
        macs = {variant: each[tier]["macs"] for variant, each in sizes.items() if tier in each}
        if len(macs) == len(there) and macs[winner] > SAME_SIZE * min(macs.values()):
            fewest = min(macs.values())
            small = {variant: there[variant] for variant in there if macs[variant] <= SAME_SIZE * fewest}
            fitting = max(small, key=lambda variant: sign * small[variant])
            words[-1] += (
                f" Its network there takes {short(macs[winner])} MACs; the best of the smallest ones, that of "
                f"{fitting} with {short(macs[fitting])}, has {shown(metric, small[fitting])}."
            )
    return words


def _winner(
    same_seeds: Results, metric: str, winner: str, value: float, at: tuple[str, str] | None = None
) -> str:
    """``Best accuracy over all device classes: fjord, 95.0 %.``, or that this cannot be told."""
    where = "over all device classes" if at is None else f"on the {at[1]} devices (tier {at[0]})"
    what = f" {metric}" if at is None else ""
    doubt = doubted(same_seeds, metric, winner, at[0] if at else None)
    if not doubt:
        return f"Best{what} {where}: {winner}, {shown(metric, value)}."
    first = "Lowest" if less_is_better(metric) else "Highest"
    seeds = len(same_seeds.get(winner, ()))
    others = _listed(doubt)
    if not seeds:
        return (
            f"{first}{what} {where}: {winner}, {shown(metric, value)}; no common seed tells it from {others}."
        )
    told = f"within the noise of {others}" if seeds >= ENOUGH_SEEDS else f"too few to tell it from {others}"
    run = "one seed" if seeds == 1 else f"these {seeds} seeds"
    return f"{first}{what} {where} in {run}: {winner}, {shown(metric, value)}; {told}."


def _listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1} others"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _alone(results: Results, metric: str) -> list[str]:
    """The figures of one method, which is compared with nothing."""
    ((variant, value),) = means(results, metric).items()
    words = [f"{variant}: {metric} {shown(metric, value)}, the mean over device classes."]
    tiers = _common_tiers(results)
    for tier, what in _outermost(tiers) if len(tiers) > 1 else ():
        words.append(
            f"On the {what} devices (tier {tier}): {shown(metric, _at(results, metric, tier)[variant])}."
        )
    return words


def target_in_words(metric: str, target: float | None, costs: Costs) -> list[str]:
    """What it cost to reach the target."""
    if target is None:
        return []
    goal, reached = shown(metric, target), {name: cost for name, cost in costs.items() if cost["reached"]}
    if not reached:
        alone = next(iter(costs)) if len(costs) == 1 else "No method"
        return [f"{alone} {'did not reach' if len(costs) == 1 else 'reached'} {goal}."]
    least = min(reached, key=lambda variant: reached[variant]["bytes"])
    cheap = min(reached, key=lambda variant: reached[variant]["flops"])
    sent, flops = size(reached[least]["bytes"]), f"{short(reached[cheap]['flops'])} FLOPs"
    if len(reached) == 1:
        only = "" if len(costs) == 1 else ", as no other method did"
        return [f"{least} reached {goal} with {sent} sent and {flops}{only}."]
    also = "" if cheap == least else f"{cheap} "
    return [f"To reach {goal}, {least} sends least ({sent}) and {also}computes least ({flops})."]


def _outermost(tiers: Sequence[str]) -> list[tuple[str, str]]:
    return [(tiers[0], "smallest"), (tiers[-1], "largest")] if tiers else []


def _at(results: Results, metric: str, tier: str) -> dict[str, float]:
    """Of every method: the mean over seeds at one tier."""
    return {
        variant: statistics.mean(last_evaluation(records)[tier][metric] for records in runs)
        for variant, runs in results.items()
    }


def _common_tiers(results: Results) -> list[str]:
    """The device classes that every run was evaluated for, the smallest first."""
    ends = [last_evaluation(records) for runs in results.values() for records in runs]
    return [tier for tier in ends[0] if all(tier in end for end in ends)]
