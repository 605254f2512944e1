"""The bookkeeping of tracing: every channel gets a number, rules tie numbers, and ties become groups.

While a module is traced, each axis that may shrink is an array of unit numbers, one per position. Concatenation
concatenates such arrays, flattening repeats them, a residual addition ties two of them element by element, and
an operation that must see every channel fixes them. When the last node has been seen, numbers that were tied are
one unit, and units that lie on the same axes form a channel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedtailor.elastic.groups import Axis, ChannelGroups, Extent, Indices, Size

Labels = tuple[Indices | None, ...]    # per axis: the unit number of every position, or None where nothing shrinks


@dataclass
class Units:
    """Unit numbers, and what the rules said about them."""

    count: int = 0
    ties: list[tuple[Indices, Indices]] = field(default_factory=list)
    fixed: list[tuple[Indices, str]] = field(default_factory=list)
    axes: dict[tuple[str, int], Indices] = field(default_factory=dict)    # (tensor, axis) -> unit numbers
    sizes: list[tuple[str, str, int | None, Indices]] = field(default_factory=list)
    outputs: list[Indices] = field(default_factory=list)
    producers: dict[str, Indices] = field(default_factory=dict)

    def fresh(self, count: int) -> Indices:
        """New units."""
        numbers = np.arange(self.count, self.count + count, dtype=np.int64)
        self.count += count
        return numbers

    def tie(self, a: Indices, b: Indices) -> Indices:
        """Position by position, ``a`` and ``b`` are the same unit."""
        if a is not b:
            self.ties.append((np.broadcast_to(a, b.shape).ravel(), b.ravel()))
        return a

    def fix(self, labels: Indices | None, reason: str) -> None:
        """These units can never be cut."""
        if labels is not None:
            self.fixed.append((labels.ravel(), reason))

    def drive(self, tensor: str, dim: int, labels: Indices) -> None:
        """Axis ``dim`` of ``tensor`` holds these units; a tensor that is used twice ties both uses."""
        known = self.axes.setdefault((tensor, dim), labels)
        self.tie(known, labels)

    def follow(self, layer: str, attribute: str, labels: Indices, index: int | None = None) -> None:
        """The attribute of the layer must equal the number of kept positions."""
        self.sizes.append((layer, attribute, index, labels))


def solve(units: Units, shapes: dict[str, tuple[int, ...]], tied_names: dict[str, str]) -> ChannelGroups:
    """Turn numbers and ties into named groups."""
    roots = _components(units.count, units.ties)
    reasons: dict[int, str] = {}
    for numbers, reason in units.fixed:
        for root in np.unique(roots[numbers]):
            reasons.setdefault(int(root), reason)
    group_of, unit_of, names, fixed = _form_groups(units, roots, reasons)
    layout = _Layout(roots, group_of, unit_of, names, np.bincount(group_of[group_of >= 0], minlength=len(names)))
    irregular: dict[str, str] = {}
    extents = {
        tensor: tuple(
            layout.extent(units.axes.get((tensor, dim)), length, f"{tensor} axis {dim}", irregular)
            for dim, length in enumerate(shape)
        )
        for tensor, shape in shapes.items()
    }
    sizes = tuple(
        Size(layer, attribute, layout.extent(numbers, len(numbers), layer, irregular), index)
        for layer, attribute, index, numbers in units.sizes
    )
    return ChannelGroups(
        widths={name: int(layout.widths[number]) for number, name in enumerate(names)},
        extents=extents,
        sizes=sizes,
        fixed={**fixed, **irregular},
        outputs=layout.groups_on(units.outputs),
        producers={layer: layout.groups_on([numbers]) for layer, numbers in units.producers.items()},
        ties=tied_names,
    )


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
        np.minimum.at(roots, roots[a], low)    # hook the larger root under the smaller one ...
        np.minimum.at(roots, roots[b], low)
        np.minimum.at(roots, a, low)
        np.minimum.at(roots, b, low)
        roots = roots[roots]    # ... and shorten the chains
        if np.array_equal(before, roots):
            return roots


def _form_groups(
    units: Units, roots: Indices, reasons: dict[int, str]
) -> tuple[Indices, Indices, list[str], dict[str, str]]:
    """Units that lie on the same axes the same number of times are one group, named after their first axis."""
    marks = np.zeros(units.count, dtype=np.uint64)
    first_axis = np.full(units.count, -1, dtype=np.int64)
    first_position = np.zeros(units.count, dtype=np.int64)
    keys = list(units.axes)
    random = np.random.default_rng(0).integers(1, 2**63, size=len(keys), dtype=np.uint64)    # a hash per axis
    for number, key in enumerate(keys):
        on_axis = roots[units.axes[key]]
        np.add.at(marks, on_axis, random[number])
        new, position = np.unique(on_axis, return_index=True)
        unseen = first_axis[new] < 0
        first_axis[new[unseen]] = number
        first_position[new[unseen]] = position[unseen]
    classes = np.flatnonzero((np.arange(units.count) == roots) & (first_axis >= 0))
    classes = classes[np.lexsort((first_position[classes], first_axis[classes]))]
    group_of = np.full(units.count, -1, dtype=np.int64)
    unit_of = np.full(units.count, -1, dtype=np.int64)
    names: list[str] = []
    fixed: dict[str, str] = {}
    numbers: dict[tuple[int, str], int] = {}
    members: list[int] = []
    for unit in classes.tolist():
        reason = reasons.get(unit, "")
        signature = (int(marks[unit]), reason)
        if signature not in numbers:
            numbers[signature] = len(names)
            names.append(_group_name(keys[int(first_axis[unit])], names))
            members.append(0)
            if reason:
                fixed[names[-1]] = reason
        group = numbers[signature]
        group_of[unit], unit_of[unit] = group, members[group]
        members[group] += 1
    return group_of, unit_of, names, fixed


def _group_name(key: tuple[str, int], taken: list[str]) -> str:
    tensor, dim = key
    layer = tensor.rpartition(".")[0] or tensor
    base = layer if dim == 0 else f"{layer}.in"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    return name


@dataclass
class _Layout:
    """Where each group lies on an axis, read off the unit numbers of the axis."""

    roots: Indices
    group_of: Indices
    unit_of: Indices
    names: list[str]
    widths: NDArray[np.int64]

    def groups_on(self, axes: Sequence[Indices]) -> tuple[str, ...]:
        numbers = {int(g) for labels in axes for g in np.unique(self.group_of[self.roots[labels]]) if g >= 0}
        return tuple(self.names[number] for number in sorted(numbers))

    def extent(self, labels: Indices | None, length: int, place: str, irregular: dict[str, str]) -> Extent:
        if labels is None:
            return Extent(length)
        classes = self.roots[labels]
        groups = self.group_of[classes]
        axes = []
        for group in np.unique(groups[groups >= 0]).tolist():
            positions = np.flatnonzero(groups == group)
            axis = self._fit(group, positions, self.unit_of[classes[positions]])
            if axis is None:
                irregular[self.names[group]] = f"its channels lie in an irregular order on {place}"
            else:
                axes.append(axis)
        return Extent(length, tuple(axes))

    def _fit(self, group: int, positions: Indices, unit: Indices) -> Axis | None:
        """Offset, repeat, blocks and stride that reproduce the positions of every unit, if there are any."""
        width = int(self.widths[group])
        times, rest = divmod(len(positions), width)
        first = positions[unit == 0]
        if rest or len(first) != times:
            return None
        gaps = np.flatnonzero(np.diff(first) != 1)
        repeat = int(gaps[0]) + 1 if len(gaps) else times
        blocks, rest = divmod(times, repeat)
        stride = int(first[repeat] - first[0]) if blocks > 1 else 0
        axis = Axis(self.names[group], int(first[0]), repeat, blocks, stride)
        order = np.lexsort((positions, unit))
        expected = np.concatenate([axis.positions([j]) for j in range(width)]) if not rest else first
        return axis if np.array_equal(positions[order], expected) else None
