"""What each method really spent on a client of each tier, and where budgets were unequal.

A client counts in the tier that it had in a round. Methods are compared over the rounds that all of them have recorded,
where clients and data are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from statistics import median_low
from typing import Any

from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.record import TierSpent
from fedtailor.report.targets import Records, Results

FIGURES = {"macs": "MACs", "bytes": "bytes", "parameters": "parameters"}  # of a ``PerClient``, and in words
TOLD = ("macs", "bytes")  # in words; parameters follow bytes, and are told by their figures alone
TOLERANCE = 0.05  # a larger difference is no rounding to whole channels
LIMITS = {"macs": "macs", "bytes": "bytes", "parameters": "params"}  # figure -> the limit of a budget
BUDGET = "of its budget"
MOST_TIERS = 4  # that are named of many
PASSES = 3  # a step is a forward pass and a backward one, which counts as two

Allowed = Mapping[str, Mapping[str, int]]  # tier -> limit -> of a forward pass, or of one way
Ratios = Mapping[str, float]  # of figures
Spending = Mapping[str, Mapping[str, "PerClient"]]  # method -> tier


@dataclass(frozen=True)
class PerClient:
    """What one client of a tier spent in a round that it took part in: the mean over clients, rounds and seeds."""

    clients: float  # of this tier that took part in a round
    macs: float  # of training
    bytes: float  # down and up
    parameters: float  # weights and biases that it was sent
    of_budget: Ratios = field(default_factory=dict)  # figure -> ratio to what the tier's budget allows
    of_others: Ratios = field(default_factory=dict)  # figure -> ratio to the middle method of the tier


def spending(
    results: Results, allowed: Mapping[str, Allowed] | None = None
) -> dict[str, dict[str, PerClient]]:
    """Of every method and tier; methods whose runs did not record it are left out.

    Of an even number of methods the lower of the two in the middle is what the others are measured by.
    """
    known = {method: runs for method, runs in results.items() if method not in not_recorded(results)}
    rounds = _common_rounds([records for runs in known.values() for records in runs])
    found: dict[str, dict[str, PerClient]] = {}
    for method, runs in known.items():
        counted = [record for records in runs for record in records if record.round in rounds]
        budgets = (allowed or {}).get(method, {})
        found[method] = {
            tier: _per_client(total, len(counted), budgets.get(tier, {}))
            for tier, total in _sums(counted, budgets).items()
        }
    usual = {tier: _usual(found, tier) for each in found.values() for tier in each}
    return {
        method: {tier: replace(each, of_others=_ratios(each, usual[tier])) for tier, each in tiers.items()}
        for method, tiers in found.items()
    }


def not_recorded(results: Results) -> list[str]:
    """The methods of which a run was made before it was recorded what tiers spend."""
    return [
        method
        for method, runs in results.items()
        if not all(any(record.by_tier for record in records) for records in runs)
    ]


def allowed_by(setup: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    """What budgets allow, from a run's ``setup.json``; nothing where they do not limit it."""
    return {tier["name"]: tier.get("allowed") or {} for tier in setup.get("tiers", ())}


def widths_of(setup: Mapping[str, Any]) -> dict[str, Fraction]:
    """The width that each tier may have, from a run's ``setup.json``, which has it in decimals."""
    known = {tier["name"]: tier.get("width") for tier in setup.get("tiers", ())}
    return {
        tier: Fraction(width).limit_denominator(1000)
        for tier, width in known.items()
        if isinstance(width, int | float) and 0 < width <= 1
    }


def narrower(variant: str, setting: str, widths: object, tiers: Mapping[str, WidthLike]) -> str:
    """Where a method trains a list of widths alone, a tier between them gets the next smaller one: in a sentence.

    ``tiers`` are the widths that they may have; nothing is said where each is one of the list. ``setting`` is what the
    list is called where the method was named.

    >>> print(narrower("fjord", "fjord:widths", ["1/4", 1], {"small": "1/3", "large": 1}))
    fjord trains the widths 1/4, 1 alone: tier small may have width 1/3 and gets at most 1/4; \
fjord:widths=["1/3",1] trains the fleet's own.
    """
    trained = [as_width(width) for width in widths] if isinstance(widths, list | tuple) else []
    own = {tier: as_width(width) for tier, width in tiers.items()}
    given = {
        tier: max(fitting)
        for tier, width in own.items()
        if (fitting := [each for each in trained if each <= width])
    }
    less = [tier for tier, width in given.items() if width < own[tier]]
    if not less:
        return ""
    told = [f"tier {tier} may have width {own[tier]} and gets at most {given[tier]}" for tier in less]
    more = f" and {len(less) - MOST_TIERS} more get less" if len(less) > MOST_TIERS else ""
    listed = ",".join(f'"{each}"' if each.denominator > 1 else str(each) for each in sorted({*own.values()}))
    return (
        f"{variant} trains the widths {', '.join(map(str, trained))} alone: {', '.join(told[:MOST_TIERS])}{more}; "
        f"{setting}=[{listed}] trains the fleet's own."
    )


def unequal_budgets(found: Spending) -> list[str]:
    """A sentence for each method that differs from the others at the same tier."""
    return _sentences(found, (_unequal,))


def above_budget(found: Spending) -> list[str]:
    """A sentence for each method that spends more than its budget allows."""
    return _sentences(found, (_above,))


def everything_unequal(found: Spending) -> list[str]:
    """Both; what is true of others and of the budget is said once."""
    return _sentences(found, (_unequal, _above))


def marks(found: Spending, method: str, tier: str) -> str:
    """What is unequal about one tier of one method, in words: ``1.26x the MACs of the others``."""
    unequal, above = _unequal(found[method][tier]), _above(found[method][tier])
    above = {figure: ratio for figure, ratio in above.items() if figure not in unequal}
    parts = ((_listed(unequal), _others(method, found)), (_listed(above), BUDGET))
    return "; ".join(f"{listed} {whose}" for listed, whose in parts if listed)


def fairness_data(
    results: Results, allowed: Mapping[str, Allowed], less: Sequence[str] = ()
) -> dict[str, Any]:
    """All of it as plain data; ``less``: the sentences of ``narrower``."""
    found = spending(results, allowed)
    return {
        "methods": {
            method: {tier: asdict(each) for tier, each in tiers.items()} for method, tiers in found.items()
        },
        "unequal": unequal_budgets(found),
        "above_budget": above_budget(found),
        "narrower": list(less),
        "not_recorded": not_recorded(results),
    }


def cannot_run(runs: Sequence[Records], allowed: Allowed) -> list[str]:
    """The tiers that were evaluated on a network for which their budget does not pay."""
    last = next(record for record in reversed(runs[0]) if record.tiers)
    return [
        tier
        for tier, cost in last.deployed.items()
        if any(cost.get(limit, 0) > (1 + TOLERANCE) * most for limit, most in allowed.get(tier, {}).items())
    ]


def times(ratio: float) -> str:
    """A ratio for people.

    >>> times(1.2634), times(0.0493), times(1234.5)
    ('1.26x', '0.049x', '1,234x')
    """
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.3g}x" if ratio >= 1 else f"{ratio:.2g}x"


def _common_rounds(runs: Sequence[Records]) -> set[int]:
    """The rounds that all runs have recorded; where there is none, those of any."""
    each = [{record.round for record in records if record.by_tier} for records in runs]
    return set.intersection(*each) or set.union(*each) if each else set()


def _sums(records: Records, tiers: Iterable[str]) -> dict[str, TierSpent]:
    """Of all rounds, in the order of the fleet: a round may have clients of some tiers alone."""
    evaluated = (tier for record in records for tier in record.tiers or ())
    sums = dict.fromkeys([*tiers, *evaluated], TierSpent())
    for record in records:
        for tier, spent in record.by_tier.items():
            sums[tier] = sums.get(tier, TierSpent()) + spent
    return {tier: total for tier, total in sums.items() if total.asked}


def _per_client(total: TierSpent, rounds: int, allowed: Mapping[str, int]) -> PerClient:
    """Means: of what was sent over those who were asked, of the rest over those whose updates could be used."""
    answered, examples = max(1, total.answered), max(1, total.examples)
    mean = PerClient(
        clients=total.asked / rounds,
        macs=total.macs / answered,
        bytes=total.bytes_down / total.asked + total.bytes_up / answered,
        parameters=total.parameters / total.asked,
    )
    spent = {"macs": total.macs / (PASSES * examples), "bytes": mean.bytes / 2, "parameters": mean.parameters}
    limits = {figure: allowed[limit] for figure, limit in LIMITS.items() if allowed.get(limit)}
    return replace(mean, of_budget={figure: spent[figure] / limit for figure, limit in limits.items()})


def _usual(found: Spending, tier: str) -> dict[str, float]:
    """Of every figure the middle one of the methods that have this tier; nothing where only one has it."""
    every = [tiers[tier] for tiers in found.values() if tier in tiers]
    return {
        figure: median_low(getattr(each, figure) for each in every) for figure in FIGURES if len(every) > 1
    }


def _ratios(each: PerClient, usual: Mapping[str, float]) -> dict[str, float]:
    return {figure: getattr(each, figure) / value for figure, value in usual.items() if value}


def _unequal(each: PerClient) -> dict[str, float]:
    return {figure: ratio for figure, ratio in each.of_others.items() if abs(ratio - 1) > TOLERANCE}


def _above(each: PerClient) -> dict[str, float]:
    return {figure: ratio for figure, ratio in each.of_budget.items() if ratio > 1 + TOLERANCE}


def _others(method: str, found: Spending) -> str:
    others = [other for other in found if other != method]
    return f"of {others[0]}" if len(others) == 1 else "of the others"


def _sentences(found: Spending, kinds: Sequence[Callable[[PerClient], Ratios]]) -> list[str]:
    """``fjord spends 1.2x to 1.26x the MACs of the others (tiers 0.4 to 1).``"""
    together: dict[tuple[str, str], list[str]] = {}  # what is spent, where -> than whose it is more
    for method, tiers in found.items():
        for kind in kinds:
            whose = BUDGET if kind is _above else _others(method, found)
            for listed, where in _over_tiers({tier: kind(each) for tier, each in tiers.items()}):
                together.setdefault((f"{method} spends {listed}", where), []).append(whose)
    return [f"{spent} {' and '.join(whose)} ({where})." for (spent, where), whose in together.items()]


def _over_tiers(ratios: Mapping[str, Ratios]) -> Iterator[tuple[str, str]]:
    """``1.2x to 1.26x the MACs`` and ``tiers 0.4 to 1``; figures of the same tiers together."""
    together: dict[str, dict[str, list[str]]] = {}
    for figure in TOLD:
        by_tier = {tier: each[figure] for tier, each in ratios.items() if figure in each}
        if by_tier:
            ends = dict.fromkeys(times(end(by_tier.values())) for end in (min, max))
            same = together.setdefault(_named(list(by_tier), list(ratios)), {})
            same.setdefault(" to ".join(ends), []).append(FIGURES[figure])
    for where, told in together.items():
        yield _joined(told), where


def _named(some: Sequence[str], every: Sequence[str]) -> str:
    """
    >>> _named(["b", "c", "d"], "abcd"), _named(["a", "c"], "abc"), _named(["a"], "ab"), _named(["a", "b"], "ab")
    ('tiers b to d', 'tiers a, c', 'tier a', 'all tiers')
    """
    if len(some) == 1:
        return f"tier {some[0]}"
    if len(some) == len(every):
        return "all tiers"
    start = every.index(some[0])
    unbroken = len(some) > 2 and list(every[start : start + len(some)]) == list(some)
    return f"tiers {some[0]} to {some[-1]}" if unbroken else f"tiers {', '.join(some)}"


def _listed(ratios: Ratios) -> str:
    """``1.26x the MACs``, ``0.26x the MACs and bytes``: figures of equal ratios together."""
    together: dict[str, list[str]] = {}
    for figure in (figure for figure in TOLD if figure in ratios):
        together.setdefault(times(ratios[figure]), []).append(FIGURES[figure])
    return _joined(together)


def _joined(told: Mapping[str, Sequence[str]]) -> str:
    return " and ".join(f"{ratio} the {' and '.join(figures)}" for ratio, figures in told.items())
