"""What a client keeps for itself, on its own disk: by run and round, so that a server that was resumed finds it.

A file appears whole or not at all. The newest rounds stay, as many as the server may fall back; a memory that is gone
is no error: the client starts afresh and says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.engines.flower.frames import digest_of
from fedtailor.errors import CorruptError
from fedtailor.storage.files import remove_file, replace_file
from fedtailor.storage.wire import decode, encode

Version = tuple[int, str]
NAME = re.compile(r"round-(\d{8})-(train|calibrate)\.kept")


@dataclass(frozen=True)
class Cupboard:
    """The memories of one client in one run."""

    folder: Path

    def put(self, version: Version, memory: dict[str, Tensor], keep: int) -> None:
        """Keep a memory, and let go of those that no server can ask for any more."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._file(version), encode(memory))
        rounds = sorted({version[0], *(round for round, _ in self._versions())})[-keep:]
        for old in self._versions():
            if old[0] not in rounds:
                remove_file(self._file(old))

    def get(self, version: Version) -> dict[str, Tensor] | None:
        """The memory of this version, if it is still there and whole."""
        file = self._file(version)
        if not file.is_file():
            return None
        try:
            found = decode(file.read_bytes())
        except CorruptError:
            return None
        return found if isinstance(found, dict) else None

    def _file(self, version: Version) -> Path:
        return self.folder / f"round-{version[0]:08d}-{version[1]}.kept"

    def _versions(self) -> list[Version]:
        found = [NAME.fullmatch(file.name) for file in self.folder.glob("round-*.kept")]
        return [(int(match[1]), match[2]) for match in found if match is not None]


def put_maps(folder: Path, name: str, frame: bytes) -> None:
    """Keep a map of masks, which is sent once."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{name}.levels", [frame])


def get_maps(folder: Path, name: str) -> Levels | None:
    """The map of masks of this name, if it is still there and whole."""
    file = folder / f"{name}.levels"
    frame = file.read_bytes() if file.is_file() else b""
    return Levels(decode(frame)["levels"]) if frame and digest_of(frame) == name else None
