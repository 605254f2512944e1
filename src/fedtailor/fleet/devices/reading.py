"""Where tables of devices come from: the built-in one, TOML, CSV, or rows that are given."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.errors import FedtailorError, unknown
from fedtailor.fleet.devices.table import COLUMNS, KEYS, Devices, Numbers, checked, devices_of, table_of

BUILT_IN = "built-in"
AT_ONCE = 50_000  # rows of a CSV file that are held as text
FORMATS = "a .toml file with [[devices]], a .csv file with a header, or 'built-in'"

DevicesLike = str | Sequence[Mapping[str, Any]]


def read_devices(source: DevicesLike) -> Devices:
    """A table by its place, or of rows that are given."""
    if not isinstance(source, str):
        return devices_of(source)
    if source == BUILT_IN:
        text = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
        return devices_of(_rows(text, "the built-in devices"), "devices")
    path = Path(source)
    try:
        if path.suffix == ".csv":
            return _read_csv(path)
        if path.suffix == ".toml":
            return devices_of(_rows(path.read_text(encoding="utf-8"), str(path)), f"devices of {path.name}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedtailorError(f"fleet.devices = {source!r} cannot be read: {error}") from error
    raise FedtailorError(f"fleet.devices = {source!r}: expected {FORMATS}")


def built_in_sources() -> dict[str, str]:
    """Where the numbers of each built-in device are from."""
    text = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["sources"])


def _rows(text: str, where: str) -> list[Mapping[str, Any]]:
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FedtailorError(f"{where}: not valid TOML: {error}") from error
    for key in table:
        if key not in ("devices", "sources"):
            raise unknown(f"key in {where}", key, ("devices",))
    rows = table.get("devices")
    if not isinstance(rows, list):
        raise FedtailorError(f"{where} has no [[devices]]: expected one for every class of devices")
    return rows


def _read_csv(path: Path) -> Devices:
    """A row for each device; a column that is missing, or a cell that is empty, has its default."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        for name in header:
            if name not in KEYS:
                raise unknown(f"column of {path.name}", name, KEYS)
        if "macs_per_second" not in header:
            raise FedtailorError(f"{path.name} has no column macs_per_second: expected at least that one")
        names: list[str] = []
        parts: dict[str, list[Numbers]] = {name: [] for name in COLUMNS}
        for rows in _batches(reader, len(header), path):
            cells = dict(zip(header, zip(*rows, strict=True), strict=True))
            own = cells.get("name")
            names += own if own is not None else [f"device {len(names) + n}" for n in range(len(rows))]
            for name, column in COLUMNS.items():
                default = column.default
                given = [cell if cell.strip() else default for cell in cells[name]] if name in cells else None
                found = (
                    np.full(len(rows), default)
                    if given is None
                    else checked(name, given, names[-len(rows) :])
                )
                parts[name].append(np.asarray(found, dtype=np.float64))
    if not names:
        raise FedtailorError(f"{path.name} has no rows: expected one for every device")
    return table_of(names, {name: np.concatenate(each) for name, each in parts.items()}, path.name)


def _batches(reader: Iterator[list[str]], width: int, path: Path) -> Iterator[list[list[str]]]:
    line = 1
    while rows := list(islice(reader, AT_ONCE)):
        for row in rows:
            line += 1
            if len(row) != width:
                raise FedtailorError(
                    f"{path.name}, line {line}: {len(row)} cells; expected {width}, as in its header"
                )
        yield rows
