"""Which axes of which tensors grow and shrink together: plain, picklable, printable data, names only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """Where the units of one channel group lie on one axis of a tensor.

    Unit ``j`` of the group occupies the positions ``offset + b * stride + j * repeat + r`` for every
    ``b < blocks`` and ``r < repeat``. Three numbers describe everything that networks do to channels:

    - ``offset``: the second input of a concatenation starts behind the first;
    - ``repeat``: flattening (C, H, W) gives every channel H*W consecutive features;
    - ``blocks``: an LSTM stacks four gates, attention stacks heads, each holding every unit once.

    >>> Axis("conv", repeat=4).positions([0, 2]).tolist()      # channels 0 and 2, flattened over 2 x 2
    [0, 1, 2, 3, 8, 9, 10, 11]
    >>> Axis("hidden", blocks=4, stride=10).positions([0, 1]).tolist()      # two units of an LSTM of 10
    [0, 1, 10, 11, 20, 21, 30, 31]
    """

    group: str
    offset: int = 0
    repeat: int = 1
    blocks: int = 1
    stride: int = 0

    def positions(self, units: Sequence[int] | Indices) -> Indices:
        """The sorted positions of ``units`` (sorted) on this axis."""
        block = np.arange(self.blocks, dtype=np.int64)[:, None, None] * self.stride
        unit = np.asarray(units, dtype=np.int64)[None, :, None] * self.repeat
        return np.sort((self.offset + block + unit + np.arange(self.repeat, dtype=np.int64)).ravel())

    def spans(self, length: int, count: int) -> bool:
        """Whether the units of the group fill an axis of this length in their order, so that a prefix is a prefix."""
        return self.offset == 0 and self.blocks == 1 and count * self.repeat == length


@dataclass(frozen=True)
class Extent:
    """One axis of a tensor: its full length and the groups that drive parts of it.

    Positions that no group drives are never cut.
    """

    length: int
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Size:
    """A layer attribute that must follow the cut, such as ``num_features`` of a batch norm."""

    layer: str
    attribute: str
    extent: Extent
    index: int | str | None = None  # of a tuple (``normalized_shape``) or a dict (``r`` of peft): which entry


@dataclass(frozen=True)
class Constraint:
    """What a cut of a group must respect, in units: at least ``minimum``, and a multiple of ``multiple``.

    >>> Constraint(minimum=4, multiple=8).round_up(9, of=30), Constraint(minimum=4).round_up(1, of=30)
    (16, 4)
    """

    minimum: int = 1
    multiple: int = 1

    def round_up(self, count: int, of: int) -> int:
        """The smallest allowed number of units that is at least ``count``; the whole group is always allowed."""
        wanted = max(count, self.minimum)
        return min(of, -(-wanted // self.multiple) * self.multiple)

    def allows(self, count: int, of: int) -> bool:
        """Whether a cut may keep ``count`` units."""
        return count == of or (count >= self.minimum and count % self.multiple == 0)


@dataclass(frozen=True)
class ChannelGroups:
    """The result of tracing a module.

    A *group* is a set of tensor axes that share one list of units: convolution outputs that a residual
    addition joins, together with the batch norms and the next convolutions' inputs. Cutting unit ``j`` of a
    group removes its positions from all of them. Input, output and vocabulary axes are groups too, but
    ``fixed``: they never shrink (an update may still credit single rows of an output group).
    """

    counts: dict[str, int]  # group -> its units
    extents: dict[str, tuple[Extent, ...]]  # tensor -> one extent per axis
    sizes: tuple[Size, ...] = ()
    fixed: dict[str, str] = field(default_factory=dict)  # group -> why it cannot shrink
    outputs: tuple[str, ...] = ()  # fixed groups that lie on the module's outputs
    producers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # layer -> groups of its output
    ties: dict[str, str] = field(default_factory=dict)  # second name of a shared tensor -> its first
    constraints: dict[str, Constraint] = field(default_factory=dict)  # groups that not every width suits

    @cached_property
    def elastic(self) -> tuple[str, ...]:
        """The groups that can shrink."""
        return tuple(group for group in self.counts if group not in self.fixed)

    def without_sizes(self) -> ChannelGroups:
        """The groups for a module whose sizes never change."""
        return replace(self, sizes=())

    def constraint(self, group: str) -> Constraint:
        """What a cut of this group must respect."""
        return self.constraints.get(group, Constraint())

    def channels_per_unit(self, group: str) -> int:
        """How many channels one unit stands for: 4 for a stream of 4 heads, 1 for an LSTM (whose gates are rows)."""
        return self._channels.get(group, 1)

    @cached_property
    def _channels(self) -> dict[str, int]:
        """Of every group that lies on an axis, once: methods that draw widths in each step ask for it in each step."""
        fewest: dict[str, int] = {}
        for extent in (extent for extents in self.extents.values() for extent in extents):
            taken = Counter[str]()
            for axis in extent.axes:
                taken[axis.group] += axis.repeat * axis.blocks
            for group, count in taken.items():
                fewest[group] = min(count, fewest.get(group, count))
        return fewest

    def rigid(self, tensor: str, only: str | None = None) -> int:
        """How many entries of a tensor no cut leaves out (no cut of one group, if it is given)."""
        elastic = {only} if only else set(self.elastic)
        count = 1
        for extent in self.extents[tensor]:
            driven = np.zeros(extent.length, dtype=bool)
            for axis in extent.axes:
                if axis.group in elastic:
                    driven[axis.positions(range(self.counts[axis.group]))] = True
            count *= int((~driven).sum())
        return count

    def elastic_share(self, tensors: Iterable[str]) -> float:
        """The share of all entries of these tensors that some cut leaves out."""
        names = list(tensors)
        total = sum(prod(extent.length for extent in self.extents[name]) for name in names)
        return 1 - sum(self.rigid(name) for name in names) / max(1, total)

    def tensors(self, group: str) -> list[tuple[str, int]]:
        """The (tensor, axis) pairs that a group drives."""
        return [
            (tensor, dim)
            for tensor, extents in self.extents.items()
            for dim, extent in enumerate(extents)
            if any(axis.group == group for axis in extent.axes)
        ]
