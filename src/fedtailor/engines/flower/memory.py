"""What a client keeps for itself, on its own disk: by run and round, so that a server that was resumed finds it.

A file appears whole or not at all. The newest rounds stay, as many as the server may fall back; a memory that is gone
is no error: the client starts afresh and says so. Names come from messages: only those of our own form become files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.engines.flower.frames import digest_of
from fedtailor.errors import CorruptError, require
from fedtailor.storage.files import PART, Buffer, remove_file, replace_file
from fedtailor.storage.wire import decode, encode

Version = tuple[int, str]
STAGES = ("train", "calibrate")
NAME = re.compile(rf"round-(\d{{8}})-({'|'.join(STAGES)})\.kept(\.\d+{re.escape(PART)})?")
MAPS = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Cupboard:
    """The memories of one client in one run."""

    folder: Path

    def put(
        self, version: Version, memory: dict[str, Tensor], keep: int, asked: Version | None = None
    ) -> None:
        """Keep a memory, and let go of those that no server can ask for any more.

        Of each stage the newest rounds stay; and whatever else there is, this memory and the one that the server asked
        for (``asked``), however old: it may not have taken any that came later.
        """
        _put(self._file(version), encode(memory))
        found = self._found()
        stay = {version, asked}
        for stage in STAGES:
            rounds = sorted({round for round, each in found.values() if each == stage})
            stay |= {(round, stage) for round in rounds[-keep:]}
        for file, each in found.items():
            if each not in stay:
                remove_file(file)

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
        round, stage = version
        fine = isinstance(round, int) and 0 <= round < 10**8 and stage in STAGES
        require(fine, "memory", version, f"a round and {' or '.join(STAGES)}")
        return self.folder / f"round-{round:08d}-{stage}.kept"

    def _found(self) -> dict[Path, Version]:
        """What lies here, also of writers that were killed."""
        found = {file: NAME.fullmatch(file.name) for file in self.folder.glob("round-*")}
        return {file: (int(match[1]), match[2]) for file, match in found.items() if match is not None}


def put_maps(folder: Path, name: str, frame: bytes) -> None:
    """Keep a map of masks, which is sent once; nodes that share a folder share it."""
    require(digest_of(frame) == name, "map of masks", name, "the digest of what was sent under this name")
    if get_maps(folder, name) is None:
        _put(folder / f"{name}.levels", [frame])


def get_maps(folder: Path, name: str) -> Levels | None:
    """The map of masks of this name, if it is still there and whole."""
    file = folder / f"{name}.levels"
    frame = file.read_bytes() if MAPS.fullmatch(name) and file.is_file() else b""
    return Levels(decode(frame)["levels"]) if frame and digest_of(frame) == name else None


def _put(file: Path, chunks: Sequence[Buffer]) -> None:
    """Put a file in place, also while another process puts the same one there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, chunks, part=file.with_name(f"{file.name}.{os.getpid()}{PART}"))
