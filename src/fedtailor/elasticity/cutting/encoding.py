"""Cuts as plain values."""

from __future__ import annotations

from collections.abc import Iterable


def as_text(units: Iterable[int]) -> str:
    """Units as ranges.

    >>> as_text([0, 1, 2, 7, 9, 10])
    '0-2,7,9-10'
    """
    if isinstance(units, range) and units.step == 1:
        return f"{units.start}-{units.stop - 1}" if len(units) > 1 else str(units.start)
    parts: list[list[int]] = []
    for unit in units:
        if parts and unit == parts[-1][1] + 1:
            parts[-1][1] = unit
        else:
            parts.append([unit, unit])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def from_text(text: str) -> list[int]:
    """The units of ``as_text``.

    >>> from_text("0-2,7")
    [0, 1, 2, 7]
    """
    units: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        units.extend(range(int(first), int(last or first) + 1))
    return units
