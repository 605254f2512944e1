"""The address of a piece of the model: which units of each channel group are kept, and which single weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from fedtailor.elasticity.cutting.levels import Mask
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.errors import FedtailorError, unknown

Units = range | tuple[int, ...]  # sorted; a prefix is always a ``range`` so that it hashes and slices fast


def as_units(units: Iterable[int], count: int, group: str) -> Units:
    """Sorted, unique and in range, a prefix as ``range``; anything else is refused by name.

    >>> as_units([0, 1, 2], 8, "conv1"), as_units([2, 5], 8, "conv1")
    (range(0, 3), (2, 5))
    """
    if isinstance(units, range) and units.start == 0 and units.step == 1 and 0 < len(units) <= count:
        return units
    values = tuple(int(unit) for unit in units)
    if not values:
        raise FedtailorError(f"group {group!r}: no unit kept; at least one is needed")
    if any(b <= a for a, b in pairwise(values)):
        raise FedtailorError(f"group {group!r}: units must be sorted and unique")
    if values[0] < 0 or values[-1] >= count:
        raise FedtailorError(f"group {group!r}: units {values[0]}..{values[-1]} lie outside 0..{count - 1}")
    return range(len(values)) if values[-1] == len(values) - 1 else values


@dataclass(frozen=True)
class Cut:
    """Which units of each group are kept; a group that is not named is kept whole.

    ``tag`` is a short name for what belongs to this cut alone, such as per-width statistics
    (``bn1.running_mean@1/4``). It is not part of the address: equal channels are equal cuts.

    ``width`` is the share of units by which it was made; None where its units were chosen otherwise. ``depth`` is the
    share of blocks that it runs; None where it was not cut in depth.

    A cut with a ``mask`` keeps all channels and leaves out single weights: of every tensor in the mask's map, its
    patches hold the surviving values alone, in one row. A mask of level 0 leaves nothing out, but brings the map along.

    ``absent`` names tensors that it leaves out altogether: a network without its last blocks. A layer that has lost
    all its tensors is skipped, it hands on what it is given first.
    """

    channels: Mapping[str, Units] = field(default_factory=dict)
    tag: str = field(default="", compare=False)
    mask: Mask | None = None
    width: Fraction | None = field(default=None, compare=False)
    absent: frozenset[str] = frozenset()
    depth: Fraction | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.mask is not None and self.channels:
            raise FedtailorError("a cut leaves out whole channels or single weights: expected not both")

    @staticmethod
    def everything() -> Cut:
        """The full model."""
        return Cut(tag="1", width=Fraction(1))

    @staticmethod
    def of(
        groups: ChannelGroups,
        channels: Mapping[str, Iterable[int]],
        tag: str = "",
        width: Fraction | None = None,
        absent: frozenset[str] = frozenset(),
    ) -> Cut:
        """A checked cut: known groups, valid units; groups that are kept whole are left out."""
        kept: dict[str, Units] = {}
        for group in sorted(channels):
            if group not in groups.counts:
                raise unknown("channel group", group, groups.counts)
            units = as_units(channels[group], groups.counts[group], group)
            if len(units) < groups.counts[group]:
                kept[group] = units
        if not kept and not tag and not absent:
            return Cut.everything()
        cut = Cut(kept, tag, width=width, absent=absent)
        return cut if tag else replace(cut, tag=cut.digest)

    def with_channels(self, groups: ChannelGroups, channels: Mapping[str, Iterable[int]]) -> Cut:
        """The same cut with other units, under the same tag; what it leaves out beside channels stays left out."""
        return replace(self, channels=Cut.of(groups, channels, self.tag or "1").channels)

    def without(self, tensors: Iterable[str], tag: str) -> Cut:
        """The same cut less some tensors, under a tag of its own."""
        return replace(self, absent=self.absent | frozenset(tensors), tag=tag)

    @property
    def sparse(self) -> Mask | None:
        """The mask, if it leaves out anything."""
        return self.mask if self.mask is not None and self.mask.level else None

    @property
    def unmasked(self) -> Cut:
        """The same channels with all their weights, without a map of levels."""
        return self if self.mask is None else replace(self, mask=None)

    @cached_property
    def key(self) -> tuple[tuple[str, Units], ...]:
        """What makes two cuts of channels equal."""
        return tuple(sorted(self.channels.items(), key=lambda item: item[0]))

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that stand for the address."""
        text = ";".join(f"{group}={_text(units)}" for group, units in self.key)
        if self.sparse is not None:
            text += f"{self.sparse.levels.digest}>={self.sparse.level}"
        if self.absent:
            text += f"-{','.join(sorted(self.absent))}"
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @cached_property
    def _hash(self) -> int:
        return hash((self.key, self.sparse, self.absent))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Cut)
            and self.key == other.key
            and self.sparse == other.sparse
            and self.absent == other.absent
        )

    def share(self, groups: ChannelGroups) -> Fraction:
        """The width by which it was made; of a cut that was made otherwise, the mean share of units that it keeps."""
        if self.width is not None:
            return self.width
        kept = sum(self.count(group, groups.counts[group]) for group in groups.elastic)
        return Fraction(kept, sum(groups.counts[group] for group in groups.elastic))

    def count(self, group: str, full: int) -> int:
        """How many units of a group are kept."""
        units = self.channels.get(group)
        return full if units is None else len(units)

    def holds(self, inner: Cut) -> bool:
        """Whether every coordinate of ``inner`` belongs to this cut."""
        if self.sparse is not None and (inner.sparse is None or not self.sparse.holds(inner.sparse)):
            return False
        if not self.absent <= inner.absent:
            return False
        for group, held in self.channels.items():
            wanted = inner.channels.get(group)
            if wanted is None:
                return False
            prefixes = isinstance(held, range) and isinstance(wanted, range)
            if not (len(wanted) <= len(held) if prefixes else set(wanted) <= set(held)):
                return False
        return True


def _text(units: Units) -> str:
    return f"[:{len(units)}]" if isinstance(units, range) else ",".join(map(str, units))
