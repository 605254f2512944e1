"""Unit numbers: every channel gets one, rules tie them, and what is tied becomes channel groups.

While a module is traced, each axis that may shrink is an array of unit numbers, one per position. Concatenation
concatenates such arrays, flattening repeats them, a residual addition ties two of them element by element, and
an operation that must see every channel fixes them. When ``numbering.py`` has seen the last node, numbers that were
tied are one unit, and units that lie on the same axes form a channel group (``../groups.py``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedtailor.elasticity.groups import Axis, ChannelGroups, Constraint, Extent, Indices, Size

MOST_RUNS = 8  # a group that lies in more runs on an axis is not cut
MOST_SPLITS = 4  # times that groups are split into their runs

# Per axis of a value: the unit number of every position, or None where nothing shrinks.
Numbers = tuple[Indices | None, ...]


@dataclass
class Units:
    """Unit numbers, and what the rules said about them."""

    count: int = 0
    ties: list[tuple[Indices, Indices]] = field(default_factory=list)
    fixed: list[tuple[Indices, str]] = field(default_factory=list)
    known_fixed: set[int] = field(default_factory=set)
    doubtful: list[tuple[Indices, str]] = field(default_factory=list)  # fixed for want of a rule
    axes: dict[tuple[str, int], Indices] = field(default_factory=dict)  # (tensor, axis) -> unit numbers
    sizes: list[tuple[str, str, int | None, Indices]] = field(default_factory=list)
    # (layer, attribute, entry) of the user's own code -> the axes that it counts; None: an axis that cannot shrink
    counted: dict[tuple[str, str, int | str | None], list[Indices | None]] = field(default_factory=dict)
    parts: list[Indices] = field(default_factory=list)  # pieces of axes that the code counts: ``x[:, :2]``
    copies: set[int] = field(
        default_factory=set
    )  # the first numbers of axes along which all entries are alike
    minima: list[tuple[Indices, int]] = field(default_factory=list)
    outputs: list[Indices] = field(default_factory=list)
    producers: dict[str, Indices] = field(default_factory=dict)

    def fresh(self, count: int) -> Indices:
        """New units."""
        numbers = np.arange(self.count, self.count + count, dtype=np.int64)
        self.count += count
        return numbers

    def copied(self, count: int) -> Indices:
        """New units for an axis along which something is repeated."""
        numbers = self.fresh(count)
        self.copies.add(int(numbers[0]))
        return numbers

    def tie(self, a: Indices, b: Indices) -> Indices:
        """Position by position, ``a`` and ``b`` are the same unit."""
        if a is not b:
            self.ties.append((np.broadcast_to(a, b.shape).ravel(), b.ravel()))
        return a

    def fix(self, numbers: Indices | None, reason: str) -> None:
        """These units can never be cut."""
        if numbers is not None:
            self.fixed.append((numbers.ravel(), reason))
            self.known_fixed.update(numbers.ravel().tolist())

    def free(self, numbers: Indices | None) -> Indices | None:
        """The numbers, or None if every unit of them is known to be fixed: then it is an axis like any other."""
        if numbers is None or not self.known_fixed.issuperset(numbers.ravel().tolist()):
            return numbers
        return None

    def drive(self, tensor: str, dim: int, numbers: Indices) -> None:
        """Axis ``dim`` of ``tensor`` holds these units; a tensor that is used twice ties both uses."""
        known = self.axes.setdefault((tensor, dim), numbers)
        self.tie(known, numbers)

    def follow(self, layer: str, attribute: str, numbers: Indices, index: int | None = None) -> None:
        """The attribute of the layer must equal the number of kept positions."""
        self.sizes.append((layer, attribute, index, numbers))

    def at_least(self, numbers: Indices | None, minimum: int) -> None:
        """A cut must keep this many of the units, or the network means nothing (a deviation over one channel)."""
        if numbers is not None:
            self.minima.append((numbers.ravel(), minimum))


@dataclass(frozen=True)
class Solution:
    """Numbers turned into groups, and where each number went."""

    groups: ChannelGroups
    arrangement: Arrangement
    attributes: tuple[Size, ...]  # sizes of the user's own layers, for pieces of the user's own class

    @property
    def torn(self) -> bool:
        """Whether an attribute would need two sizes at once."""
        places = [(size.layer, size.attribute, size.index) for size in self.attributes]
        return len(set(places)) < len(places)

    def kept(self, numbers: Indices, dropped: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which positions of an axis remain when the units marked in ``dropped`` are gone."""
        kept: NDArray[np.bool_] = ~dropped[self.arrangement.roots[numbers]]
        return kept

    def dropped(self, channels: Mapping[str, Sequence[int]]) -> NDArray[np.bool_]:
        """The unit numbers that a cut drops."""
        gone = np.zeros(len(self.arrangement.roots), dtype=bool)
        for group, kept in channels.items():
            members = self.arrangement.group_of == self.arrangement.names.index(group)
            gone |= members & ~np.isin(self.arrangement.unit_of, np.asarray(kept))
        return gone


def solve(units: Units, shapes: Mapping[str, tuple[int, ...]], tied_names: dict[str, str]) -> Solution:
    """Turn numbers and ties into named groups."""
    roots = _components(units.count, units.ties)
    reasons: dict[int, str] = {}
    for numbers, reason in (*units.fixed, *units.doubtful):
        for root in np.unique(roots[numbers]).tolist():
            reasons.setdefault(root, reason)
    pieces = np.zeros(units.count, dtype=np.uint64)  # of groups that lie in several runs on some axis
    for _ in range(MOST_SPLITS):
        arrangement, fixed = _form_groups(units, roots, reasons, pieces)
        extents = {
            tensor: tuple(
                arrangement.extent(units.axes.get((tensor, dim)), length, f"{tensor} axis {dim}")
                for dim, length in enumerate(shape)
            )
            for tensor, shape in shapes.items()
        }
        sizes = {
            Size(layer, attribute, arrangement.extent(numbers, len(numbers), layer), index): None
            for layer, attribute, index, numbers in units.sizes
        }
        attributes = _attribute_sizes(units, arrangement)
        if not arrangement.split(pieces):
            break
    minima: dict[str, int] = {}
    for numbers, minimum in units.minima:
        for group in arrangement.groups_on([numbers]):
            minima[group] = max(minimum, minima.get(group, 1))
    groups = ChannelGroups(
        counts={name: int(arrangement.widths[number]) for number, name in enumerate(arrangement.names)},
        extents=extents,
        sizes=tuple(sizes),
        fixed={**fixed, **{name: irregular.reason for name, irregular in arrangement.irregular.items()}},
        outputs=arrangement.groups_on(units.outputs),
        producers={layer: arrangement.groups_on([numbers]) for layer, numbers in units.producers.items()},
        ties=tied_names,
        constraints={group: Constraint(minimum=minimum) for group, minimum in minima.items()},
    )
    elastic = set(groups.elastic)
    return Solution(groups, arrangement, tuple(size for size in attributes if _moves(size, elastic)))


def _attribute_sizes(units: Units, arrangement: Arrangement) -> dict[Size, None]:
    """The sizes that attributes of the user's layers must have: one each, unless code uses one for several axes."""
    return {
        Size(layer, attribute, arrangement.extent(numbers, len(numbers), f"{layer}.{attribute}"), index): None
        for (layer, attribute, index), uses in units.counted.items()
        for numbers in uses
        if numbers is not None
    }


def _moves(size: Size, elastic: Container[str]) -> bool:
    return any(axis.group in elastic for axis in size.extent.axes)


def join_counted(units: Units) -> None:
    """Axes that one attribute counts shrink alike, or not at all where one of them cannot."""
    for (layer, attribute, _), uses in units.counted.items():
        found = [numbers for numbers in uses if numbers is not None]
        for numbers in found:
            if len(found) < len(uses):
                place = f"{layer}.{attribute}" if layer else attribute
                units.fix(numbers, f"is counted by {place}, which also counts what cannot shrink")
            units.tie(found[0], numbers)


def _components(count: int, ties: Sequence[tuple[Indices, Indices]]) -> Indices:
    """The smallest number among all that are tied together, for every number."""
    roots = np.arange(count, dtype=np.int64)
    if not ties:
        return roots
    a = np.concatenate([first for first, _ in ties])
    b = np.concatenate([second for _, second in ties])
    while True:
        low = np.minimum(roots[a], roots[b])
        before = roots.copy()
        np.minimum.at(roots, roots[a], low)  # hook the larger root under the smaller one ...
        np.minimum.at(roots, roots[b], low)
        np.minimum.at(roots, a, low)
        np.minimum.at(roots, b, low)
        roots = roots[roots]  # ... and shorten the chains
        if np.array_equal(before, roots):
            return roots


def _form_groups(
    units: Units, roots: Indices, reasons: Mapping[int, str], pieces: NDArray[np.uint64]
) -> tuple[Arrangement, dict[str, str]]:
    """Units that lie on the same axes the same number of times are one group."""
    marks = np.zeros(units.count, dtype=np.uint64)
    first_axis = np.full(units.count, -1, dtype=np.int64)
    first_position = np.zeros(units.count, dtype=np.int64)
    keys = list(units.axes)
    hashes = np.random.default_rng(0).integers(1, 2**63, size=len(keys) + len(units.parts), dtype=np.uint64)
    for number, key in enumerate(keys):
        on_axis = roots[units.axes[key]]
        np.add.at(marks, on_axis, hashes[number])
        new, position = np.unique(on_axis, return_index=True)
        unseen = first_axis[new] < 0
        first_axis[new[unseen]] = number
        first_position[new[unseen]] = position[unseen]
    for number, part in enumerate(units.parts):  # units that are counted apart are groups apart
        np.add.at(marks, roots[part], hashes[len(keys) + number])
    classes = np.flatnonzero((np.arange(units.count) == roots) & (first_axis >= 0))
    classes = classes[np.lexsort((first_position[classes], first_axis[classes]))]
    distinct = {reason: number for number, reason in enumerate(dict.fromkeys(reasons.values()), start=1)}
    reason_of = np.zeros(units.count, dtype=np.uint64)
    for root, reason in reasons.items():
        reason_of[root] = distinct[reason]
    signatures = np.stack([marks[classes], reason_of[classes], pieces[classes]], axis=1)
    _, first, inverse = np.unique(signatures, axis=0, return_index=True, return_inverse=True)
    number_of = np.argsort(np.argsort(first))  # groups in the order in which their first units appear
    members = number_of[inverse.reshape(-1)]
    group_of = np.full(units.count, -1, dtype=np.int64)
    unit_of = np.full(units.count, -1, dtype=np.int64)
    group_of[classes] = members
    widths = np.bincount(members, minlength=len(first))
    order = np.argsort(members, kind="stable")
    unit_of[classes[order]] = np.arange(len(classes)) - np.repeat(np.cumsum(widths) - widths, widths)
    made_by = _makers(units, roots)
    names: list[str] = []
    fixed: dict[str, str] = {}
    for number, unit in enumerate(classes[np.sort(first)].tolist()):
        names.append(_group_name(made_by.get(unit), keys[int(first_axis[unit])], names, units.producers))
        if unit in reasons or widths[number] == 1:
            fixed[names[-1]] = reasons.get(unit, "is a single channel")
    return Arrangement(roots, group_of, unit_of, names, widths), fixed


def _makers(units: Units, roots: Indices) -> dict[int, str]:
    """The first layer that makes each unit."""
    made_by: dict[int, str] = {}
    for layer, numbers in units.producers.items():
        for root in np.unique(roots[numbers]).tolist():
            made_by.setdefault(root, layer)
    return made_by


def _group_name(maker: str | None, key: tuple[str, int], taken: Sequence[str], makers: Container[str]) -> str:
    """The layer that makes the channels, or the first tensor that they lie on."""
    tensor, dim = key
    layer = tensor.rpartition(".")[0] or tensor
    base = maker or (f"{layer}.in" if dim else f"{layer}.rows" if layer in makers else layer)
    name, number = base, 2
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    return name


@dataclass(frozen=True)
class Irregular:
    """A group whose units do not lie in one run on some axis."""

    reason: str
    starts: tuple[int, ...]  # the units at which new runs begin


@dataclass(frozen=True)
class Arrangement:
    """Where each group lies on an axis, read off the unit numbers of the axis."""

    roots: Indices  # number -> the number that stands for all that are tied to it
    group_of: Indices  # of such a number; -1 where no tensor holds it
    unit_of: Indices  # its position inside the group
    names: list[str]
    widths: NDArray[np.int64]
    irregular: dict[str, Irregular] = field(default_factory=dict)

    def groups_on(self, axes: Sequence[Indices]) -> tuple[str, ...]:
        """The groups that lie on any of these axes, in order."""
        found = {int(g) for numbers in axes for g in np.unique(self.group_of[self.roots[numbers]]) if g >= 0}
        return tuple(self.names[group] for group in sorted(found))

    def extent(self, numbers: Indices | None, length: int, holder: str) -> Extent:
        """The axis as segments of groups; ``holder`` names it in messages.

        Groups that no segments describe are remembered as irregular.
        """
        if numbers is None:
            return Extent(length)
        classes = self.roots[numbers]
        groups = self.group_of[classes]
        axes: list[Axis] = []
        for group in np.unique(groups[groups >= 0]).tolist():
            positions = np.flatnonzero(groups == group)
            axes += self._fit(group, positions, self.unit_of[classes[positions]], holder)
        return Extent(length, tuple(axes))

    def _fit(self, group: int, positions: Indices, unit: Indices, holder: str) -> list[Axis]:
        """Offset, repeat, blocks and stride that reproduce the positions of every unit."""
        name, width = self.names[group], int(self.widths[group])
        table = positions[np.lexsort((positions, unit))]
        if len(table) % width:  # some units of the group are not on this axis (a slice of it)
            self.irregular[name] = Irregular(f"only a part of its channels is used by {holder}", ())
            return []
        table = table.reshape(width, -1)  # a row for each unit
        gaps = np.flatnonzero(np.diff(table[0]) != 1)
        repeat = int(gaps[0]) + 1 if len(gaps) else table.shape[1]
        steps = (np.diff(table, axis=0) != repeat).any(axis=1)
        starts = table[0][::repeat]
        runs = (starts[:, None] + np.arange(repeat, dtype=np.int64)).ravel()
        if steps.any() or not np.array_equal(runs, table[0]):
            breaks = tuple((np.flatnonzero(steps) + 1).tolist())
            self.irregular.setdefault(
                name, Irregular(f"its channels lie in an irregular order on {holder}", breaks)
            )
            return []
        strides = np.diff(starts)
        if len(strides) and (strides == strides[0]).all():
            return [Axis(name, int(starts[0]), repeat, len(starts), int(strides[0]))]
        return [Axis(name, int(start), repeat) for start in starts]

    def split(self, pieces: NDArray[np.uint64]) -> bool:
        """Give the runs of irregular groups numbers of their own, if they are few; False if there is nothing to do."""
        done = False
        for name, irregular in self.irregular.items():
            if not 0 < len(irregular.starts) < MOST_RUNS:
                continue
            members = self.group_of == self.names.index(name)
            run = np.searchsorted(np.asarray(irregular.starts), self.unit_of[members], side="right")
            pieces[members] = pieces[members] * np.uint64(MOST_RUNS) + run.astype(np.uint64)
            done = True
        return done
