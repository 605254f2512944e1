"""Which multiples of channels are fast here: ``align = "auto"``, measured by training steps on this machine.

A kernel that works on sixteen channels at once takes as long for nine of them as for sixteen. Pieces of two grids are
compared at equal MACs, so that a grid wins because its steps are faster and not because its pieces are larger.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

import numpy as np

from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.costing.timing import step_time
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.steps import step

MULTIPLES = (1, 2, 4, 8, 16)
WIDTHS = tuple(Fraction(number, 5) for number in range(1, 6))
WORTH = 0.05  # of the time: a coarser grid that saves less is not taken
MOST_MORE = 1.5  # times the MACs: a grid that rounds a width up by more gives devices what they cannot run
PASSES, SECONDS = 3, 0.04  # over all pieces, so that whatever else runs meets all of them; of steps at each

Point = tuple[float, float]  # MACs of an example, seconds of a step


@dataclass(frozen=True)
class Grid:
    """The multiple to take, and the time of a step on each grid against one without, at equal MACs."""

    multiple: int
    times: Mapping[int, float]

    @property
    def in_words(self) -> str:
        """What was measured, for a person."""
        shown = ", ".join(
            f"{time:.2f} with multiples of {multiple}"
            for multiple, time in self.times.items()
            if multiple > 1
        )
        if not shown:
            return 'align = "auto" takes 1: there are no coarser widths to choose from'
        return f'align = "auto" takes {self.multiple}: a step of equal MACs against one of any widths takes {shown}'


def fastest_grid(costs: ModelCosts, workload: Workload) -> Grid:
    """Measure steps of a few widths on each grid."""
    step("measuring which multiples of channels are fast here")
    groups = costs.pieces.groups
    cuts = {multiple: [prefix(groups, width, multiple) for width in WIDTHS] for multiple in MULTIPLES}
    distinct = list(dict.fromkeys(cut for each in cuts.values() for cut in each))
    seconds = dict.fromkeys(distinct, float("inf"))
    for _ in range(PASSES if len(distinct) > 1 else 0):
        for cut in distinct:
            seconds[cut] = min(seconds[cut], _step(costs, cut, workload))

    def points(each: Sequence[Cut]) -> list[Point]:
        return [(float(costs.of(cut).macs), seconds[cut]) for cut in each]

    return chosen({multiple: points(each) for multiple, each in cuts.items()})


def _step(costs: ModelCosts, cut: Cut, workload: Workload) -> float:
    """On the CPU seconds of this process: what the machine does for others meanwhile is not counted."""
    on_cpu = all(value.device.type == "cpu" for value in costs.pieces.weights().values())
    clock = time.process_time if on_cpu else None
    return step_time(costs.pieces, cut, workload, SECONDS, clock=clock) / 1e9


def chosen(points: Mapping[int, Sequence[Point]]) -> Grid:
    """The finest grid whose steps take hardly longer than those of the fastest.

    >>> any_number = [(1.0, 2.0), (2.0, 4.0), (4.0, 4.0)]
    >>> chosen({1: any_number, 8: [(1.5, 1.5), (2.5, 2.5), (4.0, 4.0)]}).multiple
    8
    >>> chosen({1: any_number, 8: [(4.0, 2.0)] * 3}).multiple  # larger pieces are no faster ones
    1
    """
    plain = sorted(points[1])
    if len({point for each in points.values() for point in each}) == 1:
        return Grid(1, {1: 1.0})

    def at(macs: float, each: Sequence[Point]) -> float:
        known, took = zip(*sorted(each), strict=True)
        return float(np.interp(macs, list(known), list(took)))

    near = [
        multiple
        for multiple, each in points.items()
        if all(own[0] <= MOST_MORE * macs for own, (macs, _) in zip(sorted(each), plain, strict=True))
    ]
    times = {
        multiple: fmean(at(macs, points[multiple]) / seconds for macs, seconds in plain) for multiple in near
    }
    best = min(times.values())
    return Grid(next(m for m in sorted(times) if times[m] <= best * (1 + WORTH)), times)
