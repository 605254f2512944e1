"""The tables of the example with a clock: simulated time to an accuracy, and how each class of devices fares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from reproduce.shared.results import Result
from reproduce.shared.tables import Row, line, lines, mean_and_deviation, tiers_of

NEVER = "not by all"
NONE = "none that it can run"


def times(rows: Mapping[str, Row]) -> Iterator[str]:
    """Minutes until the mean over classes reached an accuracy, in all seeds; what the whole run took and cost."""
    targets = list(next(iter(next(iter(rows.values())).values()))["simulated"]["minutes_to_reach"])
    yield from lines(["", *(f"{target} %" for target in targets), "all, min", "kJ", "waiting, h", "seeds"])
    for method, row in rows.items():
        runs = [run["simulated"] for run in row.values()]
        reached = [[run["minutes_to_reach"][target] for run in runs] for target in targets]
        cells = [NEVER if None in each else f"{fmean(each):.1f}" for each in reached]
        spent = [fmean(run[key] for run in runs) for key in ("minutes", "kilojoules", "waiting_hours")]
        yield line([method, *cells, *(f"{value:.1f}" for value in spent), str(len(runs))])


def classes(rows: Mapping[str, Row]) -> Iterator[str]:
    """Accuracy of what each class of devices is given towards the end, and which share of its tasks was merged."""
    names = tiers_of(rows)
    yield from lines(["", *names])
    for method, row in rows.items():
        yield line([method, *(_class([run["simulated"] for run in row.values()], name) for name in names)])


def _class(runs: Sequence[Result], name: str) -> str:
    """A class that was never asked cannot run the network."""
    if not any(run["asked"].get(name) for run in runs):
        return NONE
    heard = fmean(run["merged"][name] for run in runs)
    return f"{mean_and_deviation([run['by_class'][name] for run in runs])} ({heard:.0%})"
