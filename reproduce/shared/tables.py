"""The tables of the pages, written from results.json: accuracy by tier, costs, and differences with their intervals.

A row ``efd:global_width=each`` is made of the runs for one tier each, as ``fedtailor compare`` joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from fedtailor.report.differences import Difference, judged, paired, what_seeds_can_tell
from reproduce.shared.results import Result

Row = dict[str, Result]  # seed -> figures


def rows_of(runs: Mapping[str, Row], methods: Sequence[str]) -> dict[str, Row]:
    """What is there of these methods, in their order; runs of one tier each are joined to one row.

    Methods of which other figures than accuracy and costs were kept have no row.
    """
    wanted = {"accuracy", "bytes", "macs"}
    runs = {name: row for name, row in runs.items() if all(wanted <= run.keys() for run in row.values())}
    found: dict[str, Row] = {}
    for method in methods:
        if not method.endswith("=each"):
            if method in runs:
                found[method] = runs[method]
            continue
        start = method.removesuffix("each")
        parts = {name.removeprefix(start): row for name, row in runs.items() if name.startswith(start)}
        joined = _joined(parts)
        if joined:
            found[method] = joined
    return found


def _joined(parts: Mapping[str, Row]) -> Row:
    """Of each tier what its own run reached; costs are those of all runs together."""
    if not parts:
        return {}
    seeds = [seed for seed in next(iter(parts.values())) if all(seed in row for row in parts.values())]
    return {
        seed: {
            "accuracy": {tier: row[seed]["accuracy"][tier] for tier, row in sorted(parts.items())},
            **{key: sum(row[seed][key] for row in parts.values()) for key in ("bytes", "macs")},
        }
        for seed in seeds
    }


def accuracy_table(rows: Mapping[str, Row]) -> Iterator[str]:
    """Mean and deviation over the seeds by tier, and what all clients together sent and computed, as Markdown."""
    tiers = tiers_of(rows)
    head = ["", *tiers, "MB", "10^9 MACs", "seeds", "refused"]
    yield from lines(head)
    for method, row in rows.items():
        cells = [
            mean_and_deviation([run["accuracy"][tier] for run in row.values() if tier in run["accuracy"]])
            for tier in tiers
        ]
        beyond = {tier for run in row.values() for tier in run.get("beyond", ())}
        if beyond:  # a network that these devices cannot run
            cells = [f"({cell})" if tier in beyond else cell for tier, cell in zip(tiers, cells, strict=True)]
        elif len(set(cells)) == 1 and len(cells) > 1:  # one network for every device
            cells = [f"{cells[0]} (all)", *[""] * (len(cells) - 1)]
        costs = [
            fmean(run["bytes"] for run in row.values()) / 1e6,
            fmean(run["macs"] for run in row.values()) / 1e9,
        ]
        refused = sum(sum(run.get("refused", {}).values()) for run in row.values())
        yield line([f"`{method}`", *cells, *(f"{cost:.0f}" for cost in costs), str(len(row)), str(refused)])


def difference_table(rows: Mapping[str, Row], first: str) -> Iterator[str]:
    """Every method against one of them, tier by tier: the mean in points and its 95 % interval, as Markdown.

    A star marks what is larger than noise once all differences of the table are judged together (Holm).
    """
    tiers, found = tiers_of(rows), differences(rows, first)
    yield from lines([f"minus `{first}`", *tiers])
    for method in rows:
        cells = [interval(found[method, tier]) if (method, tier) in found else "" for tier in tiers]
        if any(cells):
            yield line([f"`{method}`", *cells])
    seeds = max((each.seeds for each in found.values()), default=1)
    yield ""
    # Accuracies here are in per cent, the sentence expects shares.
    shares = [
        Difference(d.seeds, d.mean / 100, d.deviation / 100 if d.deviation is not None else None)
        for d in found.values()
    ]
    yield what_seeds_can_tell(seeds, shares)


def differences(rows: Mapping[str, Row], first: str) -> dict[tuple[str, str], Difference]:
    """Of every other method and tier, over the seeds that both have; judged together."""
    family = {}
    for method, row in rows.items():
        seeds = [seed for seed in row if seed in rows[first]]
        for tier in tiers_of(rows) if method != first and seeds else ():
            pairs = [
                (rows[first][seed]["accuracy"].get(tier), row[seed]["accuracy"].get(tier)) for seed in seeds
            ]
            if all(None not in pair for pair in pairs):
                family[method, tier] = paired([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return judged(family)


def tiers_of(rows: Mapping[str, Row]) -> list[str]:
    """All tiers that occur, in the order of the first run that has most of them."""
    every = [run["accuracy"] for row in rows.values() for run in row.values()]
    return list(max(every, key=len, default={}))


def mean_and_deviation(values: Sequence[float], digits: int = 1) -> str:
    """Over the seeds, for people."""
    if not values:
        return ""
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def interval(found: Difference, digits: int = 1) -> str:
    """The mean in points with half of its 95 % interval; a star where it is larger than noise."""
    width = f" ± {found.half_width:.{digits}f}" if found.half_width is not None else ""
    return f"{found.mean:+.{digits}f}{width}{'*' if found.beyond_noise else ''}"


def between(first: Sequence[float], second: Sequence[float], digits: int = 1) -> str:
    """``second`` minus ``first``, seed by seed: the mean and half of its interval; one comparison, judged alone."""
    return interval(replace(paired(first, second), chance=None), digits) if first else ""


def lines(head: Sequence[str]) -> Iterator[str]:
    """The head of a table."""
    yield line(head)
    yield "|" + "---|" * len(head)


def line(cells: Sequence[str]) -> str:
    """One row."""
    return "| " + " | ".join(cells) + " |"
