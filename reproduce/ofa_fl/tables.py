"""OFA-FL's tables, written from results.json: accuracy by density, how even it is, events, and what a device gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from reproduce.shared.results import Result
from reproduce.shared.tables import Row, between, line, lines, mean_and_deviation

AFTERWARDS = 10  # rounds within which a network recovers from an event

Runs = Mapping[str, Row]  # method -> seed -> figures


def evenness(runs: Runs, when: str) -> Iterator[str]:
    """Accuracy of every density, at the ``best`` moment or the ``final`` one; its mean and variance across densities.

    Both have their interval against those of the first method, which is OFA-FL.
    """
    first = next(iter(runs.values()))
    densities = sorted(next(iter(first.values()))["accuracy"], key=float)
    yield from lines(["", *densities, "mean", "OFA-FL minus it", "variance by seed", "OFA-FL's minus it"])
    for method, row in runs.items():
        found = [run["best"]["accuracy"] if when == "best" else run["accuracy"] for run in row.values()]
        cells = [f"{fmean(each[density] for each in found):.2f}" for density in densities]
        moments = [run[when] for run in row.values()]
        mean = mean_and_deviation([each["mean"] for each in moments], 2)
        seeds = [seed for seed in row if seed in first]
        lead, evener = (
            between(
                [row[seed][when][key] for seed in seeds], [first[seed][when][key] for seed in seeds], digits
            )
            if row is not first
            else ""
            for key, digits in (("mean", 2), ("variance", 3))
        )
        variances = ", ".join(f"{each['variance']:.3f}" for each in moments)
        yield line([method, *cells, mean, lead, variances, evener])


def events(row: Row) -> Iterator[str]:
    """Of every event and seed: the mean accuracy of the networks there are, before it, in its round, and at best after.

    Networks are those that had been pruned for before the event, so that the same ones are compared.
    """
    yield from lines(
        ["seed", "event", "before", "in its round", f"best of {AFTERWARDS} rounds", "there again"]
    )
    for seed, run in row.items():
        course = {point["round"]: point for point in run["series"]}
        for event in run["events"]:
            before, after = course[event - 1], range(event, event + AFTERWARDS)
            networks = sorted(before["accuracy"], key=float, reverse=True)[: before["supported"]]
            level, dropped, *rest = [
                _mean_of(course[number], networks) for number in (event - 1, *after) if number in course
            ]
            best = max(dropped, *rest)
            again = "yes" if best >= level else f"{best - level:+.1f}"
            yield line([seed, str(event - 1), f"{level:.1f}", f"{dropped:.1f}", f"{best:.1f}", again])


def _mean_of(point: Result, networks: list[str]) -> float:
    return fmean(point["accuracy"][network] for network in networks)


def peaks(runs: Runs) -> Iterator[str]:
    """The full network before any event, the best mean of all networks afterwards, and the last one."""
    yield from lines(["", "full network before", "all networks, best", "all networks, last"])
    for method, row in runs.items():
        before = [
            max(point["accuracy"]["1"] for point in run["series"] if point["supported"] == 1)
            for run in row.values()
        ]
        cells = [before, *([run[when]["mean"] for run in row.values()] for when in ("best", "final"))]
        yield line([method, *(mean_and_deviation(each) for each in cells)])


def devices(runs: Mapping[str, Row]) -> Iterator[str]:
    """What a device is given, by kind of network and tier: means over the seeds."""
    yield from lines(
        ["", "tier", "accuracy", "file, kB", "load, ms", "pass, ms", "pass with sparse rows, ms"]
    )
    for kind, row in runs.items():
        for tier in next(iter(row.values()))["device"]:
            each = [run["device"][tier] for run in row.values()]
            accuracy = fmean(run["accuracy"][tier] for run in row.values())
            kilobytes = fmean(one["file_bytes"] for one in each) / 1000
            times = [
                f"{fmean(one[name] for one in each):.2f}" if name in each[0] else ""
                for name in ("load_ms", "pass_ms", "sparse_pass_ms")
            ]
            yield line([kind, tier, f"{accuracy:.1f}", f"{kilobytes:.0f}", *times])
