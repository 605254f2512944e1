"""``audit.jsonl``: a line for every round, for the beginning, every resume and the end. It is only ever added to.

    {"entry": {"number": n, "before": hash of line n - 1, "event": ..., ...}, "signature": ...}

A round is written here before its checkpoint is saved. A run that is killed between the two has a round in its log that
it does again: the line of the resume says from which round it went on, and the log holds both, in the order in which
they happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor.audit.keys import public_of, read_key
from fedtailor.audit.lines import BEGUN, FINISHED, NOTHING, RESUMED, ROUND, check_chain, digest_of, lines_of
from fedtailor.audit.lines import as_bytes as as_bytes
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.record import RoundRecord
from fedtailor.storage.files import append_file, sync_file, truncate_file
from fedtailor.storage.rows import as_line, coverage_line
from fedtailor.storage.run_folder import CALL, CONFIG, WEIGHTS

FILE = "audit.jsonl"


class AuditLog:
    """An open log: the key, and where the chain ends."""

    def __init__(self, folder: Path, key: Path, round: int) -> None:
        """Begin a log, or go on with one after ``round`` rounds; one that is not whole is not added to."""
        self.path, self._key = folder / FILE, read_key(key)
        self._number, self._before = 0, NOTHING
        public = public_of(self._key)
        if not self.path.is_file() or self.path.stat().st_size == 0:
            settings = next((name for name in (CONFIG, CALL) if (folder / name).is_file()), "")
            said = {"settings": settings, "sha256": _file_digest(folder / settings)} if settings else {}
            self._append({"event": BEGUN, "round": round, "key": public, **said})
            return
        lines, rest = lines_of(self.path.read_bytes())
        if rest:  # cut short when the run was killed: it never counted
            truncate_file(self.path, sum(map(len, lines)))
        problem = check_chain(lines)
        if problem is not None:
            raise CorruptError(f"{self.path} is damaged: {problem}; nothing was added to it")
        if lines and lines[0].entry["key"] != public:
            raise FedtailorError(
                f"audit.key is not the key that began {self.path}; expected that of {lines[0].entry['key']}"
            )
        self._number, self._before = len(lines), digest_of(lines[-1].data) if lines else NOTHING
        if not lines:
            self._append({"event": BEGUN, "round": round, "key": public})
        else:
            self._append({"event": RESUMED, "round": round})

    def add(self, record: RoundRecord) -> None:
        """Add a round; it is on the disk before anybody saves what follows from it."""
        told: Mapping[str, Any] = record.audit or {}
        row, covered = as_line(record.as_row()), as_line(coverage_line(record))
        entry = {
            "event": ROUND,
            "round": record.round,
            **told,
            "merge": dict(record.merge),
            "privacy": record.privacy or None,
            "coverage": digest_of(covered),
            "metrics": digest_of(row),
        }
        self._append(entry)

    def finish(self, folder: Path, round: int) -> None:
        """The run has come to its end; the log names its result."""
        self._append({"event": FINISHED, "round": round, "weights": _file_digest(folder / WEIGHTS)})

    def _append(self, entry: Mapping[str, Any]) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        whole = {"number": self._number, "before": self._before, "time": stamp, **entry}
        signature = self._key.sign(as_bytes(whole)).hex()
        line = as_bytes({"entry": whole, "signature": signature}) + b"\n"
        append_file(self.path, line)
        sync_file(self.path)
        self._number, self._before = self._number + 1, digest_of(line)


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
