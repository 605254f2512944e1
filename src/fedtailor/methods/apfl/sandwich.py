"""The sandwich rule of universally slimmable networks: the smallest network, and random ones up to the full one.

Yu and Huang, "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import as_width, prefix, units_of
from fedtailor.elasticity.groups import ChannelGroups


def sandwich(
    groups: ChannelGroups,
    smallest: Fraction,
    random: int,
    generator: np.random.Generator,
    align: int,
    *,
    per_group: bool,
) -> list[Cut]:
    """The smallest network, and so many of widths from it to 1, drawn uniformly (for each group, if asked)."""

    def draw() -> Fraction:
        return as_width(round(float(generator.uniform(float(smallest), 1)), 4))

    def between() -> Cut:
        if not per_group:
            return prefix(groups, draw(), align)
        return Cut.of(groups, {g: range(units_of(groups, g, draw(), align)) for g in groups.elastic})

    return [prefix(groups, smallest, align), *(between() for _ in range(random))]
