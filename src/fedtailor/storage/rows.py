"""Lines and tables of a run folder as JSON: written without NaN and infinity, which JSON does not know; read with care.

A folder may have been damaged, or come from elsewhere. What is read here either has the form that was written or is
refused with one sentence (``CorruptError``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedtailor.errors import CorruptError
from fedtailor.record import Covered, RoundRecord, Row, headline

ROUND, HELD = "round", "coverage"  # keys of a line of ``coverage.jsonl``; entries are fields of ``Covered``
LARGEST_LAYER = 2**30  # pairs of outputs and inputs
LARGEST_FILE = 2**30  # bytes of a table that is read at once

Check = Callable[[Any], bool]


def as_text(value: Any, indent: int | None = None, *, tight: bool = False) -> str:
    """A value as JSON; a number that is none (NaN, infinity) becomes null. ``tight``: without spaces."""
    separators = (",", ":") if tight else None
    try:
        return json.dumps(value, indent=indent, allow_nan=False, separators=separators)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False, separators=separators)


def as_line(value: Mapping[str, Any]) -> bytes:
    """A line of a ``.jsonl`` file."""
    return as_text(value).encode() + b"\n"


def finite(value: Any) -> Any:
    """The value with None in the place of numbers that are none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def table_in(file: Path, parse: Callable[[str], Any] = json.loads) -> Row:
    """The table that a file holds; nothing where there is no file."""
    if not file.is_file():
        return {}
    try:
        size = file.stat().st_size
        found = parse(file.read_text(encoding="utf-8")) if size <= LARGEST_FILE else None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{file} is damaged: expected a table")
    return found


def parsed(line: str) -> Row:
    """A line of JSON as a table; nothing if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def record_of(line: str, coverage: Mapping[int, list[Covered]], events: Mapping[int, Row]) -> RoundRecord:
    """The record of a row of ``metrics.jsonl``, with what stands elsewhere of its round; ``ValueError`` if none."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get(ROUND), int):
        raise ValueError("no row of a round")
    for key, fits in FORMS.items():
        if key in row and not fits(row[key]):
            raise ValueError(f"{key} is {type(row[key]).__name__}")
    for key in ("tiers", "validation"):
        if row.get(key) and len({headline({"": scores}) for scores in row[key].values()}) > 1:
            raise ValueError(f"{key} are judged by different metrics")
    for key in ("tiers", "validation", "reported"):
        if row.get(key):
            row[key] = {name: {n: _number(v) for n, v in each.items()} for name, each in row[key].items()}
    event = events.get(row[ROUND], {})
    return RoundRecord.from_row(
        row, coverage.get(row[ROUND], ()), event.get("seconds", 0.0), event.get("failed")
    )


def _number(value: float | None) -> float:
    """What was written as null was no number."""
    return math.nan if value is None else value


def events_by_round(events: list[Row]) -> dict[int, Row]:
    """What is known of each round beside its row; of a round that was done again, the last time."""
    found: dict[int, Row] = {}
    for event in events:
        number, seconds, failed = event.get(ROUND), event.get("seconds"), event.get("failed", {})
        if event.get("event") == "round" and _is_count(number):
            kept = {"seconds": seconds if _is_number(seconds) and seconds is not None else 0.0}
            found[number] = {**kept, "failed": failed if _is_table_of(_are_texts)(failed) else {}}  # type: ignore[index]
    return found


def covered_by_round(lines: list[Row]) -> dict[int, list[Covered]]:
    """The coverage of each round; a line that is no such line says nothing."""
    found: dict[int, list[Covered]] = {}
    for line in lines:
        entries = line.get(HELD)
        if _is_count(line.get(ROUND)) and isinstance(entries, list) and all(map(_is_covered, entries)):
            found[line[ROUND]] = [
                Covered(each["count"], each["cut"], each.get("tags", ())) for each in entries
            ]
    return found


def coverage_line(record: RoundRecord) -> Row:
    """A round's line of ``coverage.jsonl``."""
    return {ROUND: record.round, HELD: [vars(each) for each in record.coverage]}


# What may stand where


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_table_of(fits: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_of_clients(value: Any) -> bool:
    """Counts of clients, by their numbers."""
    return _is_table_of(_counts)(value) and all(client.isdecimal() for client in value)


def _is_covered(value: Any) -> bool:
    fine = isinstance(value, dict) and _is_count(value.get("count")) and isinstance(value.get("cut"), dict)
    return fine and _are_texts(value.get("tags", []))


def is_setup(found: Row) -> bool:
    """Whether a table is what ``setup.json`` holds, as far as reports look."""
    tiers, data = found.get("tiers", []), found.get("data", {})
    if (
        not isinstance(tiers, list)
        or not isinstance(data, dict)
        or not isinstance(data.get("rows", []), list)
    ):
        return False
    numbers = (_or_none(_is_number)(data.get(key)) for key in ("clients", "train_examples", "skew"))
    tables = (isinstance(found.get(key, {}), dict) for key in ("groups", "layers", "settings"))
    return (
        all(isinstance(tier, dict) and isinstance(tier.get("name"), str) for tier in tiers)
        and all(isinstance(row, dict) and _counts_labels(row) for row in data.get("rows", []))
        and all(numbers)
        and _counts_labels({"client": 0, "name": "", "label_counts": data.get("label_counts", [])})
        and all(tables)
        and _is_table_of(_is_count)(found.get("groups", {}))
        and _is_table_of(_is_layer)(found.get("layers", {}))
    )


def is_devices(found: Row) -> bool:
    """Whether a table is what ``devices.json`` holds."""
    return (
        isinstance(found.get("when"), str)
        and isinstance(found.get("clients"), list)
        and all(map(_is_device, found["clients"]))
        and _is_table_of(_has_traffic)(found.get("tiers"))
        and _is_table_of(_is_text)(found.get("refused"))
    )


def _is_device(row: Any) -> bool:
    texts, counts = ("name", "tier", "limits"), ("client", "examples")
    return (
        _has_traffic(row)
        and all(_is_text(row.get(key)) for key in texts)
        and all(_is_count(row.get(key)) for key in counts)
        and isinstance(row.get("connected"), bool)
        and _or_none(_is_text)(row.get("last_answer"))
    )


def _has_traffic(row: Any) -> bool:
    return isinstance(row, dict) and all(
        _is_count(row.get(key)) for key in ("asked", "answered", "down", "up")
    )


def _is_layer(axes: Any) -> bool:
    """The first axes of a weight: their lengths, and the groups that lie on them."""
    fine = isinstance(axes, list) and all(
        isinstance(axis, dict)
        and _is_count(axis.get("length"))
        and isinstance(axis.get("axes"), list)
        and all(
            isinstance(each, list)
            and len(each) == 5
            and isinstance(each[0], str)
            and all(map(_is_count, each[1:]))
            for each in axis["axes"]
        )
        for axis in axes
    )
    lengths = [axis["length"] for axis in axes] if fine else [-1]
    return min(lengths, default=0) >= 0 and math.prod(lengths) <= LARGEST_LAYER


def _counts_labels(row: Row) -> bool:
    counts = row.get("label_counts", [])
    return {"client", "name"} <= row.keys() and isinstance(counts, list) and all(map(_is_count, counts))


def _or_none(fits: Check) -> Check:
    return lambda value: value is None or fits(value)


def _is_cost(value: Any) -> bool:
    """What a deployed network costs."""
    return _counts(value) and {"params", "macs"} <= value.keys()


_counts = _is_table_of(_is_count)
_scores = _or_none(_is_table_of(_is_table_of(_is_number)))
FORMS: dict[str, Check] = {
    **dict.fromkeys(("round", "clients", "merged", "abandoned", "resting", "too_small", "measured_on"), _is_count),
    **dict.fromkeys(("bytes_down", "bytes_up", "macs"), _is_count),
    **dict.fromkeys(("refused", "measuring"), _counts),
    "by_tier": _is_table_of(_counts),
    "deployed": _is_table_of(_is_cost),
    "refused_by": _is_of_clients,
    "train_loss": _is_number,
    "best_round": _or_none(_is_count),
    "tiers": _scores,
    "validation": _scores,
    "reported": _is_table_of(_is_table_of(_is_number)),
    **dict.fromkeys(("method", "privacy"), lambda value: isinstance(value, dict)),
}  # fmt: skip
