"""A cost as a function of the kept units: recorded in a few runs, evaluated in microseconds.

Each axis of each tensor, stored or computed, has ``constant + slope * units`` positions for every group that
drives it, so every cost that is a sum of products of axes can be written down once and for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, prod

import numpy as np

from fedtailor.elasticity.costing.cost import Sizes
from fedtailor.elasticity.groups import ChannelGroups, Extent, Indices

Counts = tuple[
    int, ...
]  # kept units of each elastic group, in order; a curve may have more variables behind them


@dataclass(frozen=True, eq=False)
class Curve:
    """A sum of products of sizes, each size linear in the variables.

    >>> line = Curve(np.array([1]), np.array([[0, 3]]), np.array([[[2], [0]]]))      # 2 n times 3
    >>> line.at((5,))
    30
    """

    times: Indices  # (parts,): how often each part occurs
    constants: Indices  # (parts, axes)
    slopes: Indices  # (parts, axes, variables)

    def at(self, counts: Sequence[int]) -> int:
        """The cost at these values of the variables."""
        sizes = self.constants + self.slopes @ np.asarray(counts, dtype=np.int64)
        return int(self.times @ sizes.prod(axis=1))


def recorded(run: Callable[[Counts], list[Sizes]], full: Counts, lower: Counts) -> Curve | None:
    """The curve behind ``run``, from a run at ``full`` and a few runs with some variables at their ``lower`` value.

    ``None`` where the runs do not consist of the same parts, as they must. A size that is not linear goes
    unnoticed here: compare the curve with a run at a point where every variable differs.
    """
    base = _table(run(full))
    steps = np.asarray(full, dtype=np.int64) - np.asarray(lower, dtype=np.int64)
    moving = np.flatnonzero(steps)  # the others never vary
    for codes in (_codes(len(moving)), np.eye(len(moving), dtype=np.int64)):
        lowered = [_table(run(_lowered(full, moving, code * steps[moving]))) for code in codes]
        if any(table.shape != base.shape for table in lowered):
            return None
        drops = _decoded(codes, np.array([base - table for table in lowered]).reshape(-1, *base.shape))
        if drops is not None:
            slopes = np.zeros((*base.shape, len(full)), dtype=np.int64)
            slopes[:, :, moving] = drops // steps[moving]
            return _merged(base - slopes @ np.asarray(full, dtype=np.int64), slopes)
    return None


def _lowered(full: Counts, moving: Indices, by: Indices) -> Counts:
    counts = np.asarray(full, dtype=np.int64)
    counts[moving] -= by
    return tuple(counts.tolist())


def _codes(variables: int) -> Indices:
    """Which variables to lower in which run: all columns differ, and all hold the same number of ones.

    So the variable behind a size shows in which runs the size dropped, and the sum of two columns is no column.
    """
    runs = next(count for count in range(1, variables + 2) if comb(count, (count + 1) // 2) >= variables)
    codes = np.zeros((runs, variables), dtype=np.int64)
    for variable, chosen in zip(range(variables), combinations(range(runs), (runs + 1) // 2), strict=False):
        codes[list(chosen), variable] = 1
    return codes


def _decoded(codes: Indices, drops: Indices) -> Indices | None:
    """How far each size drops with each variable; ``None`` where a size has several and the codes mix them."""
    if len(codes) == codes.shape[1] and np.array_equal(codes, np.eye(len(codes))):
        return np.moveaxis(drops, 0, -1)
    largest = drops.max(axis=0)
    matches = [(drops == code[:, None, None] * largest).all(axis=0) & (largest > 0) for code in codes.T]
    drop = np.stack(matches, axis=-1) * largest[:, :, None]
    return drop if ((drop > 0).any(axis=-1) == (drops != 0).any(axis=0)).all() else None


def of_tensors(groups: ChannelGroups, tensors: Iterable[tuple[str, int]]) -> Curve:
    """The sum of the sizes of named tensors, each times a factor (bytes per number, for instance)."""
    variables = {group: position for position, group in enumerate(groups.elastic)}
    factors, axes = [], []
    for name, factor in tensors:
        factors.append(factor)
        axes.append(groups.extents[name])
    longest = max((len(extents) for extents in axes), default=0)
    constants = np.ones((len(axes), longest), dtype=np.int64)
    slopes = np.zeros((len(axes), longest, len(variables)), dtype=np.int64)
    for part, extents in enumerate(axes):
        for dim, extent in enumerate(extents):
            constants[part, dim] = extent.length
            for group, positions in _driven(extent):
                if group in variables:
                    slopes[part, dim, variables[group]] += positions
                    constants[part, dim] -= positions * groups.counts[group]
    return Curve(np.asarray(factors, dtype=np.int64), constants, slopes)


def _driven(extent: Extent) -> list[tuple[str, int]]:
    """The groups on an axis, and how many positions each of their units takes."""
    return [(axis.group, axis.repeat * axis.blocks) for axis in extent.axes]


def _table(parts: list[Sizes]) -> Indices:
    """One row per part, filled up with ones."""
    longest = max((len(sizes) for sizes in parts), default=0)
    return np.array([(*sizes, *(1,) * (longest - len(sizes))) for sizes in parts], dtype=np.int64).reshape(
        -1, longest
    )


def _merged(constants: Indices, slopes: Indices) -> Curve:
    """Equal parts once: a recurrent layer repeats its products at every step."""
    rows = np.concatenate([constants[:, :, None], slopes], axis=2)
    unique, times = (
        np.unique(rows, axis=0, return_counts=True) if len(rows) else (rows, np.zeros(0, dtype=np.int64))
    )
    return Curve(times.astype(np.int64), unique[:, :, 0], unique[:, :, 1:])


def total(parts: list[Sizes]) -> int:
    """The sum of the products."""
    return sum(prod(sizes) for sizes in parts)
