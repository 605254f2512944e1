"""Quantities of devices as people write them: ``"2G"`` MACs, ``"5MB"`` a second, ``"50ms"``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedtailor.elasticity.costing.budget import BYTE_UNITS, COUNT_UNITS, NUMBER_AND_UNIT, TIME_UNITS
from fedtailor.errors import FedtailorError

SECONDS = {unit: size / 10**9 for unit, size in TIME_UNITS.items()} | {"min": 60.0, "h": 3600.0}
PLAIN: Mapping[str, float] = {}


def quantity(name: str, value: object, units: Mapping[str, float], expected: str) -> float:
    """A number of the smallest unit; what is none, negative or without end is refused by the name of the field.

    >>> quantity("up", "2MB", BYTE_UNITS, ""), quantity("latency", "50ms", SECONDS, "")
    (2000000.0, 0.05)
    """
    number, unit = math.nan, ""
    if isinstance(value, str):
        found = NUMBER_AND_UNIT.fullmatch(value.strip())
        if found:
            number, unit = float(found[1].replace("_", "")), found[2]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    factor = 1.0 if unit == "" else units.get(unit, math.nan)
    if not 0 <= number * factor < math.inf:
        raise FedtailorError(f"{name} = {value!r}: expected {expected}")
    return number * factor


def seconds(name: str, value: object) -> float:
    """A time; a plain number is one of seconds.

    >>> seconds("deadline", "2min"), seconds("deadline", 1.5)
    (120.0, 1.5)
    """
    return quantity(name, value, SECONDS, "a time such as '50ms', '30s', '2min' or 1.5 (seconds)")


__all__ = ["BYTE_UNITS", "COUNT_UNITS", "PLAIN", "SECONDS", "quantity", "seconds"]
