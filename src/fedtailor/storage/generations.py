"""Generations: a checkpoint is a value, all that one round hands to the next; a generation is the file of one.

It is there as a whole or not at all, sealed by a checksum, and names the generation before it.

    file   = magic | length of header (uint32) | header (JSON) | payload | sha256 of everything before
    header = round, size of the payload, digest of the generation before (the hash chain), and what the caller adds

The rename of the finished file is the one moment at which a round becomes the past. Imports no PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import CorruptError
from fedtailor.storage.files import PART, Buffer, disk_errors, remove_file, replace_file

MAGIC = b"fedtgen\x02"  # the last byte is the version
READABLE = (MAGIC, b"fedtgen\x01")  # the first version had clients' memories in every checkpoint
SUFFIX = ".checkpoint"
SPARE = f"spare{PART}"  # the room of a generation that is no longer kept: the next one is written into it
DIGEST = 32  # bytes of a sha256
_START = len(MAGIC) + 4


@dataclass(frozen=True)
class Generation:
    """One saved state that passed its checks."""

    header: Mapping[str, Any]
    payload: memoryview
    digest: str

    @property
    def round(self) -> int:
        """How many rounds had ended when it was saved."""
        return int(self.header["round"])


@dataclass(frozen=True)
class Found:
    """The newest generation that can be trusted, and why newer ones cannot."""

    generation: Generation
    refused: tuple[str, ...]


def place_of(folder: Path, round: int, suffix: str = SUFFIX) -> Path:
    """The file of a round's generation; ``suffix``: of what else is kept by round, in the same form."""
    return folder / f"{round:08d}{suffix}"


def saved_rounds(folder: Path, suffix: str = SUFFIX) -> list[int]:
    """The rounds that have a file, oldest first; whether the files are good is not looked at."""
    names = (path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def save(folder: Path, header: Mapping[str, Any], payload: Sequence[Buffer], suffix: str = SUFFIX) -> str:
    """Add the generation of ``header["round"]``; returns its digest."""
    size = sum(memoryview(chunk).nbytes for chunk in payload)
    text = json.dumps({**header, "size": size}, sort_keys=True).encode()
    chunks = [MAGIC + len(text).to_bytes(4, "little") + text, *payload]
    # Hashing takes about as long as the disk does: they run side by side.
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_digest, chunks)
        place = place_of(folder, header["round"], suffix)
        part = folder / SPARE if suffix == SUFFIX else None
        replace_file(place, chunks, seal=digest.result, part=part)
    return digest.result().hex()


def _digest(chunks: Sequence[Buffer]) -> bytes:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def load(folder: Path, round: int, suffix: str = SUFFIX) -> Generation:
    """The generation of a round, or ``CorruptError`` with the first thing that is wrong with it."""
    path = place_of(folder, round, suffix)
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise CorruptError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if len(data) < _START + DIGEST or data[: len(MAGIC)] not in READABLE:
        raise CorruptError(f"{path.name} is not a whole {suffix[1:]}")
    digest = hashlib.sha256(data[:-DIGEST]).digest()
    if digest != data[-DIGEST:]:
        raise CorruptError(f"{path.name} is damaged: its checksum does not match")
    start = _START + int.from_bytes(data[len(MAGIC) : _START], "little")
    header = _header(bytes(data[_START:start]), path.name)
    if header["round"] != round or header["size"] != len(data) - DIGEST - start:
        raise CorruptError(f"{path.name} holds round {header['round']}: it was renamed or exchanged")
    return Generation(header, data[start:-DIGEST], digest.hex())


def _header(text: bytes, name: str) -> dict[str, Any]:
    """What stands before the payload. A checksum finds accidents: whoever can write can also seal what never was."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    known = header if isinstance(header, dict) else {}
    counts = [known.get(key, 0) for key in ("round", "size", "metrics_size")]
    fine = all(type(count) is int and count >= 0 for count in counts)
    if not fine or not {"round", "size", "parent_round", "parent"} <= known.keys():
        raise CorruptError(f"{name} has no header that was ever written")
    return known


def newest(folder: Path, check: Callable[[Generation], None] = lambda _: None) -> Found:
    """The newest generation that is whole, follows from the one before it, and passes ``check``.

    ``check`` raises ``CorruptError`` for what it does not accept. If there is no such generation, that is an error:
    starting again from nothing is for the user to decide.
    """
    refused: list[str] = []
    for round in reversed(saved_rounds(folder)):
        try:
            generation = load(folder, round)
            _check_chain(folder, generation)
            check(generation)
        except CorruptError as error:
            refused.append(str(error))
        else:
            return Found(generation, tuple(refused))
    found = "; ".join(refused) if refused else "there is none"
    raise CorruptError(
        f"{folder} has no checkpoint that can be trusted ({found}): the run cannot go on from here"
    )


def _check_chain(folder: Path, generation: Generation) -> None:
    """A generation must name the digest of the one before it; one that was pruned or damaged cannot speak."""
    before = generation.header["parent_round"]
    if before is None or before not in saved_rounds(folder):
        return
    try:
        parent = load(folder, before)
    except CorruptError:
        return
    if parent.digest != generation.header["parent"]:
        name = place_of(folder, generation.round).name
        raise CorruptError(
            f"{name} does not follow from the checkpoint of round {before}: it is of another run"
        )


def prune(folder: Path, current: int, keep: int, best: int | None) -> None:
    """Give up all but the last ``keep`` generations up to the current one, and the best one.

    The room of one of them is kept for the next generation: that is faster than new room, and a run whose first
    rounds fitted on the disk will not run out of it later. Files of later rounds are damaged ones that a resumed
    run has passed by; it will replace them when it gets there.
    """
    rounds = [round for round in saved_rounds(folder) if round <= current]
    for round in rounds[:-keep]:
        if round != best:
            with disk_errors(folder, 0):
                os.replace(place_of(folder, round), folder / SPARE)


def clean(folder: Path) -> None:
    """Remove what is not a generation: the spare room, and what a crash left behind."""
    for path in folder.glob(f"*{PART}"):
        with disk_errors(path, 0):
            remove_file(path)
