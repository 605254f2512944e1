"""A client's secrets between two messages of one round, on its own disk: Flower starts a process for every message.

Whoever needs them takes them out, and puts them back for the next message; taking is a rename, so of two processes one
has them. What was taken out by a process that was killed is gone, and the client counts as dropped: secrets are never
used twice. A client has those of one round alone.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedtailor.storage.files import PART, disk_errors, remove_file, replace_file, sync_folder

NAMES = "secrets-*"


@dataclass(frozen=True)
class Safe:
    """The secrets of one client in one run; files are their owner's alone."""

    folder: Path
    patience: float  # seconds after which they are of no use any more
    clock: Callable[[], float] = time.time

    def begin(self, round_name: str, content: bytes) -> bool:
        """Put secrets of a new round in the place of all others; False if those of this round are there already."""
        if self._file(round_name).exists():
            return False
        self.clear()
        self.put(round_name, content)
        return True

    def put(self, round_name: str, content: bytes) -> None:
        """Put secrets back, for the next message."""
        file = self._file(round_name)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [content], part=file.with_name(f"{file.name}.{os.getpid()}{PART}"))

    def take(self, round_name: str) -> bytes | None:
        """Take the secrets of a round out, if they are there and not too old."""
        self.clear(older=self.patience)
        file = self._file(round_name)
        taken = file.with_name(f"{file.name}.{os.getpid()}.taken")
        with disk_errors(file, 0):
            try:
                os.rename(file, taken)
            except FileNotFoundError:
                return None
            content = taken.read_bytes()
            remove_file(taken)
            sync_folder(self.folder)  # also if the power goes, they do not come back
        return content

    def clear(self, older: float = 0.0) -> None:
        """Remove secrets, all of them or those that are older than so many seconds; also those of killed processes."""
        for file in self.folder.glob(NAMES):
            with suppress(FileNotFoundError):  # another process has taken it
                if not older or self.clock() - file.stat().st_mtime > older:
                    remove_file(file)

    def _file(self, round_name: str) -> Path:
        """Names come from messages: only their digests become files."""
        return self.folder / f"secrets-{hashlib.sha256(round_name.encode()).hexdigest()[:32]}"
