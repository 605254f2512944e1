"""What a device can do: real training steps at several widths, and the curve of time against MACs that they lie on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from fedtailor.elasticity.costing.budget import amount
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.costing.timing import step_time
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.steps import step

WIDTHS = tuple(Fraction(number, 5) for number in range(1, 6))
SECONDS = 0.5  # of steps at each width


@dataclass(frozen=True)
class Point:
    """One width that was measured."""

    width: Fraction
    macs: int  # of one example
    seconds: float  # of one training step
    memory: int  # bytes that training takes, estimated


@dataclass(frozen=True)
class Curve:
    """Seconds of a training step by the MACs of one example: between steps that were measured what lies between them,
    beyond them and without them ``overhead + macs * batch_size / rate``.
    """

    overhead: float
    rate: float  # MACs of examples that are trained in a second
    batch_size: int
    steps: tuple[tuple[float, float], ...] = ()  # MACs and seconds of measured ones, both rising

    def seconds(self, macs: float) -> float:
        """Of a step of a network with so many MACs."""
        if not self.steps:
            return self.overhead + macs * self.batch_size / self.rate
        largest, longest = self.steps[-1]
        beyond = max(0.0, macs - largest) * self.batch_size / self.rate
        return longest + beyond if beyond else float(np.interp(macs, *self._known))

    def macs(self, seconds: float) -> int:
        """What a step of so many seconds pays for; 0 where it is over before anything is computed."""
        if not self.steps:
            return max(0, round((seconds - self.overhead) * self.rate / self.batch_size))
        largest, longest = self.steps[-1]
        beyond = max(0.0, seconds - longest) * self.rate / self.batch_size
        return round(largest + beyond if beyond else float(np.interp(seconds, *self._known[::-1])))

    @property
    def _known(self) -> tuple[list[float], list[float]]:
        """MACs and seconds, from a step that computes nothing."""
        nothing = (0.0, min(self.overhead, self.steps[0][1]))
        macs, seconds = zip(nothing, *self.steps, strict=True)
        return list(macs), list(seconds)


@dataclass(frozen=True)
class Bench:
    """A device, as far as one network on it shows."""

    points: tuple[Point, ...]
    curve: Curve
    free: int | None  # bytes of memory; None where the system does not say
    too_large: tuple[Fraction, ...]  # widths that were not run, because they take more memory than is free

    @property
    def deviation(self) -> float | None:
        """How far the curve through all others is off at most at a width that was measured, as a share of its step;
        the smallest and the largest width have others on one side alone and are not counted.
        """
        points, batch = self.points, self.curve.batch_size
        others = [(each, [*points[:at], *points[at + 1 :]]) for at, each in enumerate(points)][1:-1]
        return max(
            (abs(curve_of(rest, batch).seconds(each.macs) / each.seconds - 1) for each, rest in others),
            default=None,
        )


def bench(model: ElasticModel, workload: Workload, device: torch.device, threads: int = 1) -> Bench:
    """Train a few steps at each width that this device has memory for."""
    points, too_large, free = [], [], free_memory(device)
    for width in WIDTHS:
        cut = prefix(model.groups, width)
        cost = model.cost(cut, workload)
        needed = int(cost.training_memory or 0)
        if free is not None and needed > free:
            too_large.append(width)
            continue
        step(f"training steps at width {float(width):g}")
        nanoseconds = step_time(model.costs.pieces, cut, workload, SECONDS, threads)
        points.append(Point(width, cost.macs, nanoseconds / 1e9, needed))
    if not points and free is not None:
        raise FedtailorError(
            f"no width of this network can be trained here: {amount('memory', free)} of memory are free"
        )
    return Bench(tuple(points), curve_of(points, workload.batch_size), free, tuple(too_large))


def curve_of(points: Sequence[Point], batch_size: int) -> Curve:
    """The curve through measured steps, with the line closest to them by relative deviation; nothing takes less than
    no time.

    >>> line = curve_of([Point(Fraction(1), macs, 1e-3 + macs / 1e6, 0) for macs in (1000, 2000, 4000)], 1)
    >>> round(line.overhead, 9), round(line.rate), line.macs(3e-3)
    (0.001, 1000000, 2000)
    """
    rows = torch.tensor([(1.0, float(point.macs * batch_size)) for point in points], dtype=torch.float64)
    seconds = torch.tensor([point.seconds for point in points], dtype=torch.float64)
    weighted = rows / seconds[:, None]  # each step counts alike, however short
    ones = torch.ones(len(points), 1, dtype=torch.float64)
    overhead, slope = torch.linalg.lstsq(weighted, ones).solution.flatten().tolist()
    if overhead < 0 or len({point.macs for point in points}) == 1:
        overhead, slope = 0.0, float(torch.linalg.lstsq(weighted[:, 1:], ones).solution)
    if slope <= 0:
        raise FedtailorError(
            "steps of the wider networks take no longer here than those of the narrow ones, so nothing can be said "
            "about MACs: take a larger network or a larger batch, and nothing else that runs meanwhile"
        )
    return Curve(overhead, 1 / slope, batch_size, rising(points))


def rising(points: Sequence[Point]) -> tuple[tuple[float, float], ...]:
    """MACs and seconds of steps, where neighbours that are out of order, by noise or because some numbers of channels
    are slower than larger ones, have become their mean.

    >>> rising([Point(Fraction(1), macs, seconds, 0) for macs, seconds in ((10, 2.0), (30, 6.0), (50, 4.0))])
    ((10.0, 2.0), (40.0, 5.0))
    """
    pools: list[list[Point]] = []
    for point in sorted(points, key=lambda each: each.macs):
        pools.append([point])
        while len(pools) > 1 and any(
            low >= high for low, high in zip(_middle(pools[-2]), _middle(pools[-1]), strict=True)
        ):
            last = pools.pop()
            pools[-1].extend(last)
    return tuple(map(_middle, pools))


def _middle(pool: Sequence[Point]) -> tuple[float, float]:
    return fmean(each.macs for each in pool), fmean(each.seconds for each in pool)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free now, for this process and within its limits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free(), default=None)


def _free() -> Iterator[int]:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    most, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    # A container's own limit; pages of files count as used, and are given back when needed.
    if most.isdecimal() and used.isdecimal():
        pages = dict(line.split(maxsplit=1) for line in _text("/sys/fs/cgroup/memory.stat").splitlines())
        yield max(0, int(most) - int(used) + int(pages.get("inactive_file", 0)))
    if not os.path.exists("/proc/meminfo") and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
