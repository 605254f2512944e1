"""The lines of a log, and whether they form a chain. Every line has one spelling: any other byte is a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedtailor.audit.keys import HEX, is_signed
from fedtailor.storage.rows import as_text

BEGUN, RESUMED, ROUND, FINISHED = "begun", "resumed", "round", "finished"
NOTHING = "0" * 64  # in the place of a hash before the first line


@dataclass(frozen=True)
class Line:
    """One line with its end."""

    data: bytes

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def value(self) -> dict[str, Any]:
        """What it says; nothing if it is no line of a log."""
        try:
            found = json.loads(self.data)
        except (ValueError, RecursionError):
            return {}
        fine = isinstance(found, dict) and found.keys() == {"entry", "signature"}
        return (
            found if fine and isinstance(found["entry"], dict) and isinstance(found["signature"], str) else {}
        )

    @property
    def entry(self) -> dict[str, Any]:
        """What was signed."""
        return dict(self.value.get("entry", {}))


def as_bytes(value: Mapping[str, Any]) -> bytes:
    """The one spelling of a value; its keys stay in their order."""
    return as_text(value, tight=True).encode()


def digest_of(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def lines_of(data: bytes) -> tuple[list[Line], bytes]:
    """All whole lines, and what is left behind the last of them."""
    *whole, rest = data.split(b"\n")
    return [Line(each + b"\n") for each in whole], rest


def check_chain(lines: Sequence[Line]) -> str | None:
    """What is wrong with the first line that is not what was written; None if all are."""
    before, public = NOTHING, ""
    for number, line in enumerate(lines):
        if number == 0:
            said = line.entry.get("key")
            public = said if isinstance(said, str) and HEX.fullmatch(said) else ""
        fault = _fault(line, number, before, public)
        if fault:
            return f"line {number + 1}{_of_round(line)}: {fault}"
        before = digest_of(line.data)
    return None


def _fault(line: Line, number: int, before: str, public: str) -> str:
    if not line.value or as_bytes(line.value) + b"\n" != line.data:
        return "not as it was written"
    entry = line.entry
    if not _has_form(entry):
        return "not a line of a log"
    if not public:
        return "expected the public key of the log"
    if entry.get("number") != number or entry.get("before") != before:
        return "does not follow from the line before it"
    if not is_signed(public, line.value["signature"], as_bytes(entry)):
        return "its signature is not that of the log's key"
    return ""


def _has_form(entry: Mapping[str, Any]) -> bool:
    """A log may come from elsewhere, signed by anybody."""
    event, digests = entry.get("event"), {ROUND: ("model", "metrics", "coverage"), FINISHED: ("weights",)}
    known = event in (BEGUN, RESUMED, ROUND, FINISHED) and type(entry.get("round")) is int
    return known and all(isinstance(entry.get(key), str) for key in digests.get(str(event), ()))


def _of_round(line: Line) -> str:
    round = line.entry.get("round")
    return f" (round {round})" if isinstance(round, int) else ""
