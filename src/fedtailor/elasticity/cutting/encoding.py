"""Cuts as plain values, in one way for messages, worker processes and files.

    {"channels": {"conv1": 16, "conv2": "0-15,20"}, "tag": "1/4", "width": "1/4", "mask": [2, digest], "absent": [...],
     "depth": "1/2"}

A prefix is its length, other units are ranges; what a cut does not have is left out. A mask is named by its level and
the digest of its map, which is a message of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

from fedtailor.elasticity.cutting.cut import Cut, Units
from fedtailor.elasticity.cutting.levels import Levels, Mask
from fedtailor.errors import FedtailorError

RANGES = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")


def units_value(units: Units) -> int | str:
    """Units as the length of a prefix, or as ranges.

    >>> units_value(range(16)), units_value((0, 1, 2, 7, 9, 10))
    (16, '0-2,7,9-10')
    """
    if isinstance(units, range):
        return len(units)
    parts: list[list[int]] = []
    for unit in units:
        if parts and unit == parts[-1][1] + 1:
            parts[-1][1] = unit
        else:
            parts.append([unit, unit])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def units_from(value: object, most: int | None = None) -> Units:
    """The units of ``units_value``; a value that names none, or more than ``most``, is refused.

    >>> units_from("0-2,7"), units_from(3)
    ((0, 1, 2, 7), range(0, 3))
    """
    if type(value) is int and value > 0 and (most is None or value <= most):
        return range(value)
    if isinstance(value, str) and RANGES.fullmatch(value):
        units: list[int] = []
        for part in value.split(","):
            first, _, last = part.partition("-")
            start, end = int(first), int(last or first)
            if most is not None and end >= most:  # before anything of this size is made
                break
            units.extend(range(start, end + 1))
        else:
            if units and all(b > a for a, b in pairwise(units)):
                return tuple(units)
    raise FedtailorError(
        f"units = {value!r:.80}: expected the length of a prefix, or ascending ranges such as 0-2,7"
    )


def cut_value(cut: Cut) -> dict[str, Any]:
    """The cut as plain values."""
    parts: dict[str, Any] = {
        "channels": {group: units_value(units) for group, units in cut.key},
        "tag": cut.tag,
        "width": None if cut.width is None else str(cut.width),
        "mask": None if cut.mask is None else [cut.mask.level, cut.mask.levels.digest],
        "absent": sorted(cut.absent),
        "depth": None if cut.depth is None else str(cut.depth),
    }
    return {name: part for name, part in parts.items() if part or name == "channels"}


def cut_from(value: Mapping[str, Any], levels: Levels | None = None) -> Cut:
    """The cut of a value; it says what the writer's cut said, checked or not. ``levels`` is the map of its mask."""
    width, depth, mask = value.get("width"), value.get("depth"), None
    if "mask" in value:
        level, digest = value["mask"]
        if levels is None or levels.digest != digest:
            raise FedtailorError(f"a cut with a mask of the map {digest}, which did not travel with it")
        mask = Mask(levels, level)
    return Cut(
        {group: units_from(units) for group, units in value["channels"].items()},
        value.get("tag", ""),
        mask,
        None if width is None else Fraction(width),
        frozenset(value.get("absent", ())),
        None if depth is None else Fraction(depth),
    )
