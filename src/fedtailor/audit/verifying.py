"""Whether a run is what its log says: needs the folder alone, and no secret."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtailor.audit.lines import BEGUN, FINISHED, RESUMED, ROUND, Line, check_chain, digest_of, lines_of
from fedtailor.audit.log import FILE
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.storage.run_folder import CALL, CONFIG, COVERAGE, METRICS, WEIGHTS


@dataclass(frozen=True)
class Verdict:
    """What a log proves."""

    rounds: int  # how many it holds
    first: int  # rounds before its first
    key: str  # the public key whose owner wrote it
    head: str  # the hash of its last line: whoever keeps it will know a shorter log
    finished: bool
    resumed: Sequence[int] = ()  # after which rounds
    redone: Sequence[int] = field(default=())  # rounds that were done again with another result


def verify(folder: Path, key: str = "", head: str = "") -> Verdict:
    """Check a log and the files that it speaks of; the first line that is not true is an error."""
    file = folder / FILE
    if not file.is_file():
        raise FedtailorError(f"{folder}: no {FILE} there; a run with audit.key in its config writes one")
    lines, rest = lines_of(file.read_bytes())
    problem = check_chain(lines)
    if problem is None and (rest or not lines):
        problem = (
            f"line {len(lines) + 1} is cut short: the run was killed while it wrote, and a resume mends it; or "
            "someone changed it"
        )
    if problem is not None:
        raise CorruptError(f"{file}: {problem}")
    entries = [line.entry for line in lines]
    public, ends = entries[0]["key"], digest_of(lines[-1].data)
    if key and public != key:
        raise CorruptError(f"{file} was signed by {public}: expected {key}")
    if head and head not in {digest_of(line.data) for line in lines}:
        raise CorruptError(
            f"{file} has no line with the hash {head}: its end was cut off, or it is another log"
        )
    _check_settings(folder, entries[0])
    last, redone = _in_order(file, entries)
    _compare(folder, entries[0]["round"], last)
    finished = _ended(folder, file, lines)
    resumed = [each["round"] for each in entries if each["event"] == RESUMED]
    return Verdict(len(last), entries[0]["round"], public, ends, finished, resumed, redone)


def _check_settings(folder: Path, begun: dict[str, Any]) -> None:
    """The run's own settings against what was signed when it began."""
    name = begun.get("settings")
    if name not in (CONFIG, CALL):  # of a run in whose folder there were none
        return
    file = folder / name
    if not file.is_file() or digest_of(file.read_bytes()) != begun.get("sha256"):
        raise CorruptError(f"{file} is not what the log says: the settings with which the run began")


def _in_order(file: Path, entries: Sequence[dict[str, Any]]) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """The line that counts of each round, and which rounds came out otherwise when they were done again."""
    at, redone = entries[0]["round"], []
    last: dict[int, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        event, round = entry["event"], entry["round"]
        if (event == BEGUN) != (number == 0):
            raise CorruptError(f"{file}: line {number + 1}: a log begins once")
        if event == RESUMED:
            if round > at:
                raise CorruptError(
                    f"{file}: line {number + 1}: goes on after round {round}, but {at} was the last"
                )
            at = round
        elif event == ROUND:
            if round != at + 1:
                raise CorruptError(f"{file}: line {number + 1}: round {round} after round {at}")
            if round in last and last[round]["model"] != entry["model"]:
                redone.append(round)
            at, last[round] = round, entry
    return {round: entry for round, entry in last.items() if round <= at}, redone


def _compare(folder: Path, first: int, last: dict[int, dict[str, Any]]) -> None:
    """Rows of the run folder against what was signed, round by round."""
    for name, key in ((METRICS, "metrics"), (COVERAGE, "coverage")):
        rows, rest = lines_of((folder / name).read_bytes() if (folder / name).is_file() else b"")
        # A kill between log and row leaves a round without its row; it is done again.
        known = min(len(rows), first + len(last))
        for round in range(first + 1, known + 1):
            if digest_of(rows[round - 1].data) != last[round][key]:
                raise CorruptError(f"{folder / name}: round {round} is not what the log says")
        if len(rows) > first + len(last):
            raise CorruptError(
                f"{folder / name} has {len(rows)} rounds, but the log only {first + len(last)}"
            )
        if rest and name == METRICS and known == first + len(last):
            raise CorruptError(f"{folder / name}: something follows round {known}, the last of the log")


def _ended(folder: Path, file: Path, lines: Sequence[Line]) -> bool:
    weights = folder / WEIGHTS
    entry = lines[-1].entry
    if entry["event"] != FINISHED:
        if weights.is_file():
            raise CorruptError(
                f"{file} does not say that the run is finished, but {WEIGHTS} is there: the end of the log was cut "
                "off, or the run was killed in its last moment, and `fedtailor resume` writes the end"
            )
        return False
    with weights.open("rb") if weights.is_file() else _missing(weights) as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != entry["weights"]:
        raise CorruptError(f"{weights} is not the result that the log says")
    return True


def _missing(file: Path) -> Any:
    raise CorruptError(f"{file} is not there, but the log says that the run is finished")
