"""A table of devices: how fast they compute, what they hold, how they are connected, how often they are there.

A row is a class of devices, or a single one. Numbers are columns, so that a million rows are cheap; a ``Device`` is
made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet.devices.quantities import BYTE_UNITS, COUNT_UNITS, PLAIN, SECONDS, quantity

LONGEST_NAME = 100  # characters

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """What a number of a device means: its default, its units, whether it may be nothing, the most it may be."""

    default: float | None  # None: every row has to say it
    units: Mapping[str, float]
    expected: str
    zero: bool = False
    most: float = float("inf")
    endless: bool = False  # inf is no limit


A_SECOND = "bytes in a second above 0, such as '2MB'"
A_SHARE = "a share above 0 and at most 1"
WATTS = "watts, at least 0"
COLUMNS = {
    # MACs of the forward pass of examples that are trained in a second, backward pass and all: what bench-device fits.
    "macs_per_second": Column(None, COUNT_UNITS, "MACs in a second above 0, such as '2G'", endless=True),
    "overhead": Column(0.0, SECONDS, "the time that a step takes before it computes, such as '1ms'", zero=True),
    "memory": Column(float("inf"), BYTE_UNITS, "bytes above 0, such as '2GB'", endless=True),
    "down": Column(float("inf"), BYTE_UNITS, A_SECOND, endless=True),
    "up": Column(float("inf"), BYTE_UNITS, A_SECOND, endless=True),
    "latency": Column(0.0, SECONDS, "the time that a message takes before it flows, such as '50ms'", zero=True),
    "availability": Column(1.0, PLAIN, A_SHARE, most=1.0),  # of rounds in which it can be asked
    "duty": Column(1.0, PLAIN, A_SHARE, most=1.0),  # of the time that it may compute
    "watts": Column(0.0, PLAIN, WATTS, zero=True),  # while it computes
    "radio_watts": Column(0.0, PLAIN, WATTS, zero=True),  # while it sends or receives
    "share": Column(1.0, PLAIN, "a number above 0: how many of these for each of the others"),
}  # fmt: skip
KEYS = ("name", *COLUMNS)


@dataclass(frozen=True)
class Device:
    """One row: times in seconds, rates in a second."""

    name: str
    macs_per_second: float
    overhead: float = 0.0
    memory: float = float("inf")
    down: float = float("inf")
    up: float = float("inf")
    latency: float = 0.0
    availability: float = 1.0
    duty: float = 1.0
    watts: float = 0.0
    radio_watts: float = 0.0


@dataclass(frozen=True, eq=False)
class Devices:
    """All rows, and which client is which of them."""

    names: tuple[str, ...]
    columns: Mapping[str, Numbers]

    def __len__(self) -> int:
        return len(self.names)

    def row(self, number: int) -> Device:
        """The device of a row."""
        values = {name: float(self.columns[name][number]) for name in COLUMNS if name != "share"}
        return Device(self.names[number], **values)

    @lru_cache(maxsize=4)  # noqa: B019  (a table lives as long as the run)
    def rows(self, clients: int) -> NDArray[np.int32]:
        """The row of every client: by largest remainders of the shares, the first rows first."""
        share = self.columns["share"]
        if clients == len(self) and bool((share == share[0]).all()):
            return np.arange(clients, dtype=np.int32)
        exact = share * (clients / share.sum())
        counts = np.floor(exact).astype(np.int64)
        missing = clients - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
        return np.repeat(np.arange(len(self), dtype=np.int32), counts)

    def weakest(self, rows: NDArray[np.int64]) -> Device:
        """A device that is no better than any of these rows: what fits it fits them all."""
        low = ("macs_per_second", "memory", "down", "up", "availability", "duty")
        values = {
            name: float(column[rows].min() if name in low else column[rows].max())
            for name, column in self.columns.items()
            if name != "share"
        }
        return Device("", **values)


def devices_of(tables: Sequence[Mapping[str, Any]], what: str = "fleet.devices") -> Devices:
    """A table of rows that a person wrote, each checked."""
    require(len(tables) > 0, what, list(tables), "at least one device")
    for number, table in enumerate(tables):
        if not isinstance(table, Mapping):
            raise FedtailorError(
                f'{what}[{number}] = {table!r}: expected a table such as {{"name": "phone", ...}}'
            )
        for key in table:
            if key not in KEYS:
                raise unknown(f"key of {what}[{number}]", key, KEYS)
    names = [str(table.get("name", f"device {number}")) for number, table in enumerate(tables)]
    columns = {}
    for name, column in COLUMNS.items():
        given = [table.get(name, column.default) for table in tables]
        columns[name] = checked(name, given, names)
    return table_of(names, columns, what)


def table_of(names: Sequence[str], columns: Mapping[str, Numbers], what: str) -> Devices:
    """A table whose names can be told apart."""
    for name in dict.fromkeys(names):
        fine = 0 < len(name) <= LONGEST_NAME and name.isprintable()
        require(fine, f"name in {what}", name[:200], f"1 to {LONGEST_NAME} letters that can be printed")
    if len(set(names)) < len(names):
        double = next(name for number, name in enumerate(names) if name in names[:number])
        raise FedtailorError(f"name in {what} = {double!r}: two devices have it; expected different names")
    return Devices(tuple(names), columns)


def checked(name: str, given: Sequence[Any], names: Sequence[str]) -> Numbers:
    """One column as numbers; the first value that cannot be is refused with the name of its device."""
    column = COLUMNS[name]
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.array([_number(name, value, who) for value, who in zip(given, names, strict=True)])
    bad = ~((numbers >= 0) & (np.isfinite(numbers) | column.endless) & (numbers <= column.most))
    bad |= (numbers == 0) & (not column.zero)
    if bad.any():
        first = int(np.argmax(bad))
        raise FedtailorError(
            f"{name} of device {names[first]!r} = {given[first]!r}: expected {column.expected}"
        )
    return numbers


def _number(name: str, value: Any, who: str) -> float:
    column = COLUMNS[name]
    if value == column.default and value is not None:
        return float(column.default or 0.0)
    return quantity(f"{name} of device {who!r}", value, column.units, column.expected)
