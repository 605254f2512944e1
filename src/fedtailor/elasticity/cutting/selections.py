"""Which units to keep: from a width to a cut. Pure functions; methods choose among them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil, gcd, isfinite, lcm

import numpy as np

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.errors import FedtailorError, require

WidthLike = Fraction | float | int | str


def as_width(value: WidthLike, field: str = "width") -> Fraction:
    """A width as an exact rational, so that 0.6 of 10 channels is 6 and never 7.

    >>> as_width(0.6), as_width("1/16"), as_width(1)
    (Fraction(3, 5), Fraction(1, 16), Fraction(1, 1))
    """
    try:
        if isinstance(value, float) and not isfinite(value):
            raise ValueError
        # A float stands for the decimal that a person wrote: 0.2 + 0.4 reads 0.6000000000000001 and means 0.6.
        width = Fraction(f"{value:.12g}") if isinstance(value, float) else Fraction(value)
    except (ValueError, TypeError, ZeroDivisionError):
        width = Fraction(0)
    if not 0 < width <= 1 or isinstance(value, bool):
        raise FedtailorError(
            f"{field} = {value!r}: expected a number above 0 and at most 1, such as 0.25 or '1/4'"
        )
    return width


def as_candidates(widths: str | tuple[WidthLike, ...]) -> tuple[Fraction, ...]:
    """P as exact rationals.

    >>> as_candidates("uniform-2"), as_candidates((0.2, 1))
    ((Fraction(1, 2), Fraction(1, 1)), (Fraction(1, 5), Fraction(1, 1)))
    """
    if isinstance(widths, str):
        found = re.fullmatch(r"uniform-([1-9]\d*)", widths)
        require(
            found is not None,
            "method.widths",
            widths,
            "uniform-k, such as uniform-5, a list of widths, or fleet",
        )
        count = int(widths.removeprefix("uniform-"))
        return tuple(Fraction(number, count) for number in range(1, count + 1))
    candidates = [as_width(width, "method.widths") for width in widths]
    ascending = len(candidates) > 0 and candidates == sorted(set(candidates))
    require(ascending, "method.widths", widths, "at least one width, in ascending order")
    return tuple(candidates)


def kept(width: Fraction, channels: int, align: int = 1) -> int:
    """ceil(width * channels) in integers, rounded up to a multiple of ``align`` where there is room.

    >>> kept(Fraction(3, 5), 10), kept(Fraction(1, 16), 8), kept(Fraction(1, 5), 64, align=8)
    (6, 1, 16)
    """
    exact = -(-width.numerator * channels // width.denominator)
    return min(channels, ceil(exact / align) * align)


def units_of(groups: ChannelGroups, group: str, width: Fraction, align: int = 1) -> int:
    """How many units a group keeps at a width: ``ceil(width * K)``, rounded up to what its constraint allows.

    ``align`` counts channels: a stream whose units are one channel in each of 4 heads is aligned to 8 by even numbers.
    """
    constraint, full = groups.constraint(group), groups.counts[group]
    step = align // gcd(align, groups.channels_per_unit(group)) if align > 1 else 1
    joint = replace(constraint, multiple=lcm(constraint.multiple, step))
    return joint.round_up(kept(width, full), of=full)


def prefix(groups: ChannelGroups, width: Fraction, align: int = 1) -> Cut:
    """The first ``ceil(width * K)`` units of every elastic group: cuts of smaller widths lie inside larger ones."""
    channels = {group: range(units_of(groups, group, width, align)) for group in groups.elastic}
    return Cut.of(groups, channels, tag=str(width), width=width)


def random_units(groups: ChannelGroups, size: Cut, generators: Callable[[str], np.random.Generator]) -> Cut:
    """As many units of every group as ``size`` keeps, drawn without replacement.

    One set per group, so that everything a residual addition joins drops the same channels.
    """
    channels = {}
    for group, units in size.channels.items():
        drawn = generators(group).choice(groups.counts[group], size=len(units), replace=False)
        channels[group] = np.sort(drawn).tolist()
    return Cut.of(groups, channels, absent=size.absent)


def window(groups: ChannelGroups, size: Cut, start: Callable[[str], int]) -> Cut:
    """As many consecutive units of every group as ``size`` keeps, from ``start(group)`` on and around the end."""
    channels = {}
    for group, units in size.channels.items():
        count = groups.counts[group]
        channels[group] = sorted((start(group) + step) % count for step in range(len(units)))
    return Cut.of(groups, channels, absent=size.absent)
