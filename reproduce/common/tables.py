"""The tables of docs/which-method.md, written from results.json: ranks, verdicts on tailor, its parts, every cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fedtailor.report.differences import Difference, paired
from reproduce.common.plan import (
    FAR,
    FLEETS,
    METHODS,
    MOST,
    PARTS,
    PARTS_OF,
    RATES_FLEET,
    SEEDS,
    TASKS,
    able,
    at_equal_compute,
    best_rates,
    cell,
    computed,
    in_reach,
    rows,
    tried_on,
)
from reproduce.shared.results import Results
from reproduce.shared.tables import Row, accuracy_table, interval, line, lines, tiers_of

NOTHING = "Nothing has been run yet."
OF_PAPERS = ("fjord", "fjord-plain", "flanc", "flado")  # what the papers' own methods have rows of

Cells = dict[tuple[str, str], dict[str, Row]]  # (task, fleet) -> method -> seed -> figures


def cells_of(results: Results) -> Cells:
    """All cells of which anything is known."""
    every = {(task, fleet): rows(task, fleet, results) for task in TASKS for fleet in FLEETS}
    return {cell: found for cell, found in every.items() if found}


# Ranks


def ranks(cells: Cells) -> Iterator[str]:
    """Of every method its mean rank over cells, on the smallest, the largest and all tiers, and how often it leads.

    Among those at equal compute: who computes more has no rank.
    """
    if not cells:
        yield NOTHING
        return
    yield from lines(
        [
            "method",
            "smallest tier",
            "largest tier",
            "mean over tiers",
            "leads or cannot be told apart",
            "cells",
            "one seed",
        ]
    )
    cells = {cell: equal(cell, found) for cell, found in cells.items()}
    every = {cell: placed(found) for cell, found in cells.items()}
    for method in METHODS:
        own = [cell for cell, found in cells.items() if method in found]
        if not own:
            continue
        near = sum(leads(cells[cell], method) for cell in own)
        tiers = sum(len(tiers_of(cells[cell])) for cell in own)
        alone = sum(len(cells[cell][method]) == 1 for cell in own)
        told = [_mean_rank(every, method, place) for place in ("smallest", "largest", "mean")]
        told.append(f"{near} of {tiers} tiers")
        yield line([f"`{method}`", *told, str(len(own)), str(alone)])


def equal(cell: tuple[str, str], found: Mapping[str, Row]) -> dict[str, Row]:
    """The methods at equal compute."""
    return {method: row for method, row in found.items() if at_equal_compute(*cell, method)}


def _mean_rank(
    every: Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]], method: str, place: str
) -> str:
    found = [each[place][method] for each in every.values() if method in each[place]]
    return f"{fmean(found):.1f}" if found else "none"


def placed(found: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """The rank of methods in a cell, 1 for the best: on the smallest tier, the largest, and their mean.

    Where devices cannot run what a method made for them, it has no rank.
    """
    tiers = tiers_of(found)
    wanted = {"smallest": tiers[:1], "largest": tiers[-1:], "mean": tiers}
    return {
        name: ranked(
            {
                method: fmean(accuracy(row, tier) for tier in chosen)
                for method, row in found.items()
                if serves(row, chosen)
            }
        )
        for name, chosen in wanted.items()
    }


def serves(row: Row, tiers: Sequence[str]) -> bool:
    """Whether devices of these tiers can run what a method made for them."""
    return all(tier in in_reach(run) for run in row.values() for tier in tiers)


def ranked(values: Mapping[str, float]) -> dict[str, float]:
    """Ranks, the highest value first; equals share the mean of theirs.

    >>> ranked({"a": 3, "b": 1, "c": 3})
    {'a': 1.5, 'b': 3.0, 'c': 1.5}
    """
    found = {}
    for name, value in values.items():
        above = sum(other > value for other in values.values())
        equal = sum(other == value for other in values.values())
        found[name] = above + (equal + 1) / 2
    return found


def accuracy(row: Row, tier: str) -> float:
    """The mean over the seeds that a method has."""
    return fmean(run["accuracy"][tier] for run in row.values())


def difference(found: Mapping[str, Row], method: str, other: str, tiers: Sequence[str]) -> Difference:
    """``method`` minus ``other``, the mean over some tiers, paired by the seeds that both have."""
    seeds = [seed for seed in found[method] if seed in found[other]]

    def values(name: str) -> list[float]:
        return [fmean(found[name][seed]["accuracy"][tier] for tier in tiers) for seed in seeds]

    return paired(values(other), values(method))


def leads(found: Mapping[str, Row], method: str) -> int:
    """On how many tiers a method is the best, or not told apart from it by the 95 % interval; not with one seed."""
    if len(found[method]) == 1:
        return 0
    return sum(within(found, method, tier) for tier in tiers_of(found))


def within(found: Mapping[str, Row], method: str, tier: str) -> bool:
    """Whether a method is the best on a tier, or so near that the interval of the difference holds zero."""
    if not serves(found[method], [tier]):
        return False
    others = [other for other, row in found.items() if len(row) > 1 and serves(row, [tier])]
    best = max(others, key=lambda name: accuracy(found[name], tier))
    if best == method:
        return True
    apart = difference(found, method, best, [tier])
    return apart.mean >= 0 or (apart.half_width is not None and apart.mean + apart.half_width >= 0)


# What is asked of tailor


def verdicts(cells: Cells) -> Iterator[str]:
    """Cell by cell: tiers on which tailor leads or is near, its smallest tier, its mean, its traffic."""
    known = {cell: found for cell, found in cells.items() if len(found.get("tailor", {})) > 1}
    if not known:
        yield NOTHING
        return
    yield from lines(
        [
            "cell",
            "near the best on",
            "... also of those beyond equal compute",
            "smallest tier minus `fedavg-smallest`",
            "mean minus the papers' best",
            "bytes by `fjord`'s",
        ]
    )
    for (task, fleet), found in known.items():
        tiers = tiers_of(found)
        near, also = leads(equal((task, fleet), found), "tailor"), leads(found, "tailor")
        small = _told(found, "fedavg-smallest", tiers[:1])
        others = [name for name in OF_PAPERS if len(found.get(name, {})) > 1 and serves(found[name], tiers)]
        best = max(others, key=lambda name: fmean(accuracy(found[name], tier) for tier in tiers), default="")
        papers = f"{_told(found, best, tiers)} (`{best}`)" if best else ""
        traffic = f"{_bytes(found, 'tailor') / _bytes(found, 'fjord'):.2f}" if "fjord" in found else ""
        yield line([f"{task}, {fleet}", f"{near} of {len(tiers)} tiers", f"{also}", small, papers, traffic])


def _told(found: Mapping[str, Row], other: str, tiers: Sequence[str]) -> str:
    return interval(difference(found, "tailor", other, tiers)) if len(found.get(other, {})) > 1 else ""


def _bytes(found: Mapping[str, Row], method: str) -> float:
    return fmean(run["bytes"] for run in found[method].values())


# Its parts


def ablations(results: Results) -> Iterator[str]:
    """What tailor loses without each of its parts, on the smallest tier and in the mean over tiers."""
    every = {cell: results.runs(f"{cell[0]}-{cell[1]}-parts") for cell in PARTS_OF}
    every = {cell: finished(runs) for cell, runs in every.items() if "all" in finished(runs)}
    if not every:
        yield NOTHING
        return
    names = [f"{task}, {fleet}: {what}" for task, fleet in every for what in ("smallest tier", "mean")]
    yield from lines(["minus all parts", *names])
    for part in PARTS:
        told = []
        for found in every.values():
            tiers = tiers_of(found)
            for chosen in (tiers[:1], tiers):
                there = part in found and part != "all"
                told.append(interval(difference(found, part, "all", chosen)) if there else "")
        if any(told):
            yield line([f"`{part}`", *told])


def finished(runs: Mapping[str, Row]) -> dict[str, Row]:
    """Without runs that broke down."""
    kept = {name: {s: run for s, run in row.items() if "accuracy" in run} for name, row in runs.items()}
    return {name: row for name, row in kept.items() if row}


# Every cell


def every_cell(cells: Cells, results: Results) -> Iterator[str]:
    """Accuracy by tier and costs of each cell, what it took to be as good as the smallest network, who is missing."""
    if not cells:
        yield NOTHING
        return
    for (task, fleet), found in cells.items():
        yield from (f"### {task}, {fleet}", "", *accuracy_table(found), "")
        target = _target(found)
        if target is not None:
            yield from (
                f"To a mean over tiers of {target:.1f} %, where `fedavg-smallest` ends, on the first seed:",
                "",
                *lines(["", "rounds", "MB", "10^9 MACs"]),
                *(line([f"`{method}`", *reached(row, target)]) for method, row in found.items()),
                "",
            )
        yield from (*_missing(task, fleet, found, results), "")


def _target(found: Mapping[str, Row]) -> float | None:
    first = found.get("fedavg-smallest", {}).get("1")
    return None if first is None else float(first["course"][-1][-1])


def reached(row: Row, target: float) -> list[str]:
    """Rounds, megabytes and multiply-accumulates until the first seed was as good as a target."""
    for rounds, sent, macs, value in row["1"]["course"] if "1" in row else ():
        if value >= target:
            return [str(rounds), f"{sent / 1e6:.0f}", f"{macs / 1e9:.0f}"]
    return ["not reached", "", ""]


def _missing(task: str, fleet: str, found: Mapping[str, Row], results: Results) -> Iterator[str]:
    known = computed()[f"{task}-{fleet}"]["methods"]
    rates = ", ".join(f"`{method}` {rate}" for method, rate in best_rates(task, results).items())
    yield f"Rates: {rates}."
    dear = [f"`{m}` ({known[m]['times']:.1f} times)" for m in found if known[m]["times"] > MOST]
    more = [m for m in found if not at_equal_compute(task, fleet, m) and known[m]["times"] <= MOST]
    dear += [f"`{m}` ({known[m]['often']:.1f} times as often asked)" for m in more]
    if dear:
        yield f"Beyond the compute of the others: {', '.join(dear)}."
    further = cell(task, fleet, results).further  # nobody, as long as not all have been tried
    left = [method for method in found if further and method not in further]
    if left:
        yield f"Too far behind on every tier after the first seed, and left at that: {_quoted(left)}."
    wanted, tried = tried_on(task, fleet, results), results.runs(f"{task}-{fleet}")
    broken = [method for method, row in tried.items() if row and method not in found]
    if broken:
        yield f"Left the numbers on the first seed, without a result: {_quoted(broken)}."
    begun = [m for m, row in found.items() if m in wanted and m not in left and len(row) < SEEDS]
    waiting = [*begun, *(m for m in wanted if m not in found and m not in broken)]
    if waiting:
        yield f"Not run yet with all its seeds: {_quoted(waiting)}."
    hopeless = [f"`{m}`" for m in able(task, fleet) if m not in wanted and m not in found]
    if hopeless:
        names = ", ".join(hopeless)
        yield f"More than {FAR:g} points behind on every tier of `{RATES_FLEET}`, and not run here: {names}."
    refused = [f"`{method}`: {why['refused']}" for method, why in known.items() if "refused" in why]
    if refused:
        yield f"Cannot run here: {'; '.join(refused)}."


def _quoted(methods: Sequence[str]) -> str:
    return ", ".join(f"`{method}`" for method in methods)
