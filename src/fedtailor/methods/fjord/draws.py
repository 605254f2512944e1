"""What a FjORD client draws: a width of P, a width for every group, or units beyond its own width."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import kept
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.messages import Client
from fedtailor.seeds import Seeds


def drawn_width(
    widths: Sequence[Fraction], shares: Sequence[float], generator: np.random.Generator
) -> Fraction:
    """One of the first widths of P, with the probabilities of D_P given that it is one of them; none: alike."""
    bounds = list(accumulate(shares[: len(widths)] or [1.0] * len(widths)))
    return widths[bisect(bounds, generator.random() * bounds[-1], hi=len(widths) - 1)]


def mixed_prefixes(
    sliced: Iterable[str], draw: Callable[[], Fraction], groups: ChannelGroups, align: int
) -> Cut:
    """A prefix of every group that is sliced, each of a width of its own."""
    drawn = {group: draw() for group in sliced}
    counts = {group: kept(width, groups.counts[group], align) for group, width in drawn.items()}
    return Cut.of(groups, {group: range(count) for group, count in counts.items()})


def drawn_units(
    whole: Cut,
    sliced: Iterable[str],
    share: Fraction,
    groups: ChannelGroups,
    client: Client,
    round: int,
    seeds: Seeds,
) -> Cut:
    """A share of the units of F_p, the same for all steps of a client's round."""
    channels = {}
    for group in sliced:
        units = whole.count(group, groups.counts[group])
        generator = seeds.numpy(f"random drop {group}", client=client.id, round=round)
        channels[group] = np.sort(generator.choice(units, kept(share, units), replace=False)).tolist()
    return Cut.of(groups, channels)


def largest_width(cut: Cut) -> Fraction:
    """p_max of the client that holds a cut."""
    assert cut.width is not None, "every cut of FjORD is made by a width"
    return cut.width
