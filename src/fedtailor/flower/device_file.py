"""What a device says of itself: keys of ``--node-config``, or of a file that it names, which may change between rounds.

name = "phone-17"             # whatever the device is called
dataset = "photos/"
memory = "800MB"
step_time = "50ms"            # of a training step on this device: turned into MACs by what was measured
bandwidth = "1MB"             # a second, each way
transfer_time = "30s"         # that a round may take to send the piece and to send it back

[measured]                    # by ``fedtailor bench-device --write``
overhead = 0.0004
macs_per_second = 5.1e9
batch_size = 32
steps = [[120000, 0.0021], [480000, 0.0053]]    # MACs and seconds; without it, the line above
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedtailor.elasticity.costing.budget import Budget, amount, as_limit
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet.bench import Curve
from fedtailor.fleet.roster import LIMITS
from fedtailor.storage.files import replace_file
from fedtailor.toml_text import as_toml

FILE, MEASURED = "device", "measured"
SENDING = ("bandwidth", "transfer_time")
KEYS = ("name", "dataset", "tier", "state", "partition-id", "num-partitions", *LIMITS, *SENDING)

SECOND, LARGEST = 10**9, 10**30  # nanoseconds; of any number here
TIME = "a time with its unit, such as '50ms'"

NO_TIME = Curve(0.0, 1e30, 1)  # of a device that computes in no time, before one is measured

Table = dict[str, Any]


def node_table(node: Mapping[str, Any]) -> Table:
    """What a node says of itself, with the file that it names; limits are those that a server knows."""
    given = {key: value for key, value in node.items() if key != FILE}
    file = read_device(Path(str(node[FILE])).expanduser()) if FILE in node else {}
    measured = file.pop(MEASURED, None)
    for key in given:
        if key not in KEYS:
            raise unknown("key in --node-config", key, (*KEYS, FILE))
    return settled({**file, **given}, None if measured is None else curve_from(measured))


def device_limits(path: Path) -> Budget:
    """The limits in a device's file, a time of training steps and a bandwidth turned into MACs and bytes."""
    table = node_table({FILE: str(path)})
    limits = {name: table[name] for name in LIMITS if name in table}
    if not limits:
        raise FedtailorError(f"{path} has no limit: expected at least one of {', '.join(LIMITS)}")
    return Budget(**limits)


def read_device(path: Path) -> Table:
    """The table of a device's file, every key of which is known."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedtailorError(f"{path}: cannot be read ({error.strerror}); bench-device writes one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FedtailorError(f"{path}: not valid TOML: {error}") from error
    for key in table:
        if key not in (*KEYS, MEASURED):
            raise unknown(f"key in {path}", key, (*KEYS, MEASURED))
    return table


def write_device(path: Path, table: Mapping[str, Any]) -> None:
    """Put a device's file in place, all of it or none of it: a node may read it at any time."""
    settled({key: value for key, value in table.items() if key != MEASURED}, curve_from(table[MEASURED]))
    lines = [f"{key} = {as_toml(value)}" for key, value in table.items() if key != MEASURED]
    lines += ["", f"[{MEASURED}]"] if lines else [f"[{MEASURED}]"]
    lines += [f"{key} = {as_toml(value)}" for key, value in table[MEASURED].items()]
    replace_file(path, ["\n".join([*lines, ""]).encode()])


def settled(table: Mapping[str, Any], curve: Curve | None) -> Table:
    """The same with limits that a server can keep to: MACs instead of this device's time, bytes instead of bandwidth.

    >>> settled({"bandwidth": "2MB", "transfer_time": "10s"}, None)
    {'bytes': '10000000'}
    """
    found = dict(table)
    if "step_time" in found and curve is not None:
        _alone(found, "step_time", "macs")
        found["macs"] = str(_macs(found.pop("step_time"), curve))
    if any(key in found for key in SENDING):
        _alone(found, "bandwidth", "bytes")
        for one, other in (SENDING, SENDING[::-1]):
            if one in found:
                require(other in found, one, found[one], f"a {other} too")
        rate = _absolute("bandwidth", "bytes", found.pop("bandwidth"), "bytes in a second, such as '2MB'")
        nanoseconds = _absolute("transfer_time", "step_time", found.pop("transfer_time"), TIME)
        each_way = rate * nanoseconds // (2 * SECOND)
        require(each_way > 1, "transfer_time", table["transfer_time"], "time for more than a byte each way")
        found["bytes"] = str(each_way)
    Budget(**{name: found[name] for name in LIMITS if name in found})
    return found


def _alone(table: Table, name: str, other: str) -> None:
    if other in table:
        raise FedtailorError(
            f"{name} and {other} are two words for one limit of a device: expected one of them"
        )


def _macs(step_time: object, curve: Curve) -> int:
    macs = curve.macs(_absolute("step_time", "step_time", step_time, TIME) / SECOND)
    if macs < 2:
        took = amount("step_time", curve.overhead * 1e9)
        raise FedtailorError(
            f"step_time = {step_time!r}: on this device a step takes {took} before it computes"
        )
    return macs


def _absolute(name: str, kind: str, value: object, expected: str) -> int:
    """A number of units of another limit, which is no share of anything; an error names the key that was written."""
    try:
        found = as_limit(kind, value)
    except FedtailorError:
        found = None
    require(isinstance(found, int) and found <= LARGEST, name, value, expected)
    assert isinstance(found, int)
    return found


def curve_from(measured: object) -> Curve:
    """The curve in a file's table ``measured``."""
    require(isinstance(measured, Mapping), MEASURED, measured, "a table, as bench-device writes it")
    assert isinstance(measured, Mapping)
    numbers = [measured.get(name) for name in ("overhead", "macs_per_second", "batch_size")]
    fine = all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each <= LARGEST
        for each in numbers
    )
    overhead, rate, batch = (float(each or 0) for each in numbers) if fine else (0.0, 0.0, 0.0)
    require(
        fine and rate > 0 and batch >= 1,
        MEASURED,
        dict(measured),
        "numbers of bench-device",
    )
    return Curve(overhead, rate, int(batch), _steps(measured.get("steps", [])))


def _steps(given: object) -> tuple[tuple[float, float], ...]:
    """Pairs of MACs and seconds, both rising."""
    rows = given if isinstance(given, list) else [()]
    pairs = [row for row in rows if isinstance(row, list) and len(row) == 2 and all(map(_positive, row))]
    steps = [(float(macs), float(seconds)) for macs, seconds in pairs]
    fine = len(steps) == len(rows) and all(
        low < high for one, next_one in pairwise(steps) for low, high in zip(one, next_one, strict=True)
    )
    require(
        fine,
        f"{MEASURED}.steps",
        given,
        "pairs of MACs and seconds, both rising, as bench-device writes them",
    )
    return tuple(steps)


def _positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= LARGEST
