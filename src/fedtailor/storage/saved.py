"""What a saved generation stands for: whether all that belongs to it is still there, and the checkpoint that it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import torch

from fedtailor.errors import CorruptError
from fedtailor.storage import generations, sheets
from fedtailor.storage.checkpoint import Checkpoint, decode_checkpoint
from fedtailor.storage.fingerprint import Fingerprint
from fedtailor.storage.generations import Found, Generation
from fedtailor.storage.run_folder import CHECKPOINTS, MEMORIES, METRICS
from fedtailor.storage.sheets import Sheets, Span


def newest(path: Path) -> Found:
    """The newest generation of a run folder whose rows and memories are there, bit for bit."""
    return generations.newest(path / CHECKPOINTS, lambda generation: _check(path, generation))


def restored(path: Path, generation: Generation, device: torch.device) -> tuple[Checkpoint, Sheets]:
    """The checkpoint of a generation, and where its memories are written."""
    at = decode_checkpoint(generation.payload, device)
    kept = sheets.read(path / MEMORIES, Span.named_in(generation.header), device)
    return (replace(at, memories=kept.memories) if kept.pages else at), kept


def spans(path: Path, current: int) -> dict[int, Span | None]:
    """The memories that each generation up to the current one needs; a damaged one needs none."""
    found: dict[int, Span | None] = {}
    for round in generations.saved_rounds(path / CHECKPOINTS):
        if round <= current:
            try:
                found[round] = Span.named_in(generations.load(path / CHECKPOINTS, round).header)
            except CorruptError:
                continue
    return found


def read_end(path: Path, device: torch.device, best: bool = False) -> tuple[Checkpoint, Fingerprint]:
    """Where a run is, and its fingerprint, for reading alone; ``best``: at its best round instead."""
    generation = newest(path).generation
    at = restored(path, generation, device)[0]
    if best and at.best is not None:
        payload = generations.load(path / CHECKPOINTS, at.best.round).payload
        at = replace(at, state=decode_checkpoint(payload, device).state)
    return at, generation.header["fingerprint"]


def _check(path: Path, generation: Generation) -> None:
    """The rows and memories that were there when a generation was saved must still be there."""
    header, size = generation.header, generation.header.get("metrics_size", -1)
    if size < 0 or not isinstance(header.get("fingerprint"), dict):
        raise CorruptError(f"the checkpoint of round {generation.round} says nothing of its run")
    try:
        with (path / METRICS).open("rb") as file:
            kept = file.read(min(size, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise CorruptError(f"{path / METRICS} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(kept).hexdigest() != header.get("metrics_sha256"):
        raise CorruptError(f"{METRICS} is damaged somewhere before the end of round {generation.round}")
    sheets.check(path / MEMORIES, Span.named_in(header))
