"""An open run folder: rounds go in one by one, and none that went in is ever lost."""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fedtailor.errors import ClientsFailedError, FedtailorError, StorageError, require
from fedtailor.messages import ServerState
from fedtailor.record import RoundRecord
from fedtailor.storage import generations, saved, sheets
from fedtailor.storage.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from fedtailor.storage.files import (
    Lock,
    append_file,
    replace_file,
    sync_file,
    truncate_file,
)
from fedtailor.storage.fingerprint import Fingerprint, differences, refuse_drift
from fedtailor.storage.interrupt import Interrupted, Request, stop_requests
from fedtailor.storage.new_folder import make_aside, put_in_place, remove_aside
from fedtailor.storage.rows import ROUND, as_line, coverage_line, covered_by_round
from fedtailor.storage.run_folder import (
    CHECKPOINTS,
    COVERAGE,
    EVENTS,
    MEMORIES,
    METRICS,
    RunFolder,
)
from fedtailor.storage.sheets import Sheets, Span


@dataclass(frozen=True)
class CheckpointSettings:
    """How often a run is saved. It changes no result."""

    every: int = 1
    """Rounds between saved generations; a better evaluation, the last round and Ctrl-C are always saved."""
    keep: int = 2
    """How many of the last generations stay, besides the best one; the second is there if the first is damaged."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


class Unsaved:
    """Stands in for a journal where a run is not saved: at most the state of the best round is kept, in memory."""

    history: Sequence[RoundRecord] = ()

    def __init__(self, start: Checkpoint, keep_best: bool = False) -> None:
        self.at = self._best = start
        self._keep_best = keep_best

    def record(self, record: RoundRecord, at: Checkpoint) -> None:
        """Note a round."""
        if self._keep_best and at.best is not None and at.best.round == record.round:
            self._best = at

    def state_of(self, round: int) -> ServerState:
        """The state of the best round."""
        assert self._best.state.round == round, "only the best state is kept"
        return self._best.state

    def until_asked_to_stop(self) -> AbstractContextManager[object]:
        """Ctrl-C does what it always does."""
        return nullcontext()

    asked_to_stop = False

    def stop_if_asked(self, at: Checkpoint) -> None:
        """Nobody asks."""


class Journal:
    """The right to write into a run folder, and what was written last.

    Made by ``create`` for a new run or by ``open`` for one that was interrupted; ``begin`` sets it going.
    """

    def __init__(self, folder: RunFolder, lock: Lock, found: generations.Found | None) -> None:
        self.folder, self.lock = folder, lock
        self.settings = CheckpointSettings()
        self.history: list[RoundRecord] = []
        self._found = found
        self._place = folder.path  # where a new folder will appear
        self._at: Checkpoint | None = None
        self._device = torch.device("cpu")
        self._fingerprint: Fingerprint = {}
        self._saved: tuple[int | None, str] = (None, "")  # round and digest of the newest generation
        self._sheets = Sheets()  # clients' memories as they are written
        self._spans: dict[int, Span | None] = {}  # which of them each kept generation needs
        self._metrics, self._metrics_size = hashlib.sha256(), 0
        self._request = Request()

    @classmethod
    def create(cls, path: Path, texts: Mapping[str, str]) -> Journal:
        """A new folder with these files. It appears, complete, when the run begins."""
        part = make_aside(path, texts)
        try:
            journal = cls(RunFolder(part), Lock(part), None)
        except FedtailorError:
            remove_aside(part)
            raise
        journal._place = path
        return journal

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Lock an existing folder and find its newest good generation; nothing is changed yet."""
        if not path.is_dir():
            raise FedtailorError(f"{path}: no such run folder")
        lock = Lock(path)
        try:
            found = saved.newest(path)
        except FedtailorError:
            lock.release()
            raise
        return cls(RunFolder(path), lock, found)

    def begin(
        self,
        fingerprint: Fingerprint,
        settings: CheckpointSettings,
        start: Checkpoint,
        device: torch.device,
        *,
        allow_drift: bool = False,
        on_notice: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Start at ``start``, or go on from what was found if the run is still the run that was saved."""
        changed: list[str] = []
        if self._found is not None:
            changed = differences(self._found.generation.header["fingerprint"], fingerprint)
            if not allow_drift:
                refuse_drift(self.folder.path, changed)
        self.settings, self._fingerprint, self._device = settings, fingerprint, device
        if not self.lock.held:
            on_notice(f"{self.folder.path} cannot be locked on this system: start no second run there")
        self.lock.sign(f"process {os.getpid()} on {platform.node()}")
        if self._found is None:
            self._appear(start)
        else:
            self._go_on(self._found, changed, on_notice)

    def _appear(self, start: Checkpoint) -> None:
        """Save the state before the first round, then let the folder be seen."""
        self.save(start)
        put_in_place(self.folder.path, self._place)
        self.folder, self._at = RunFolder(self._place), start
        self.log("started")

    def _go_on(self, found: generations.Found, changed: list[str], on_notice: Callable[[str], None]) -> None:
        """Take up the state of a generation and drop every trace of what came after it."""
        generation, path = found.generation, self.folder.path
        self._at, self._sheets = saved.restored(path, generation, self._device)
        self._saved = (generation.round, generation.digest)
        self._spans = saved.spans(path, generation.round)
        with self._advice():
            generations.clean(path / CHECKPOINTS)
            self._prune(self._at, sheets_at_once=None)
            truncate_file(path / METRICS, generation.header["metrics_size"])
            lines = [each for each in self.folder.coverage() if covered_by_round([each])]
            lines = [each for each in lines if each[ROUND] <= generation.round]
            replace_file(path / COVERAGE, [b"".join(map(as_line, lines))])
            events = path / EVENTS
            if events.is_file() and events.read_bytes()[-1:] not in (b"", b"\n"):
                append_file(events, b"\n")  # ends a line that was cut short
        kept = (path / METRICS).read_bytes()
        self._metrics, self._metrics_size = hashlib.sha256(kept), len(kept)
        self.history = self.folder.records()
        self.log("resumed", round=generation.round, refused=found.refused, changed=changed)
        for reason in found.refused:
            on_notice(f"{reason}; going on from round {generation.round}")
        for line in changed:
            on_notice(f"changed since the run was saved: {line}")

    @property
    def at(self) -> Checkpoint:
        """Where the run is."""
        assert self._at is not None, "the journal has not begun"
        return self._at

    def record(self, record: RoundRecord, at: Checkpoint) -> None:
        """Add a round: its record, and its state where that is due."""
        self.add(record)
        self._at = at
        better = at.best is not None and at.best.round == at.state.round
        if better or at.state.round % self.settings.every == 0:
            self.save(at)

    def add(self, record: RoundRecord) -> None:
        """Add the record of a round, and nothing of its state."""
        line = as_line(record.as_row())
        with self._advice():  # the coverage first, so that a round that is saved has its line
            append_file(self.folder.path / COVERAGE, as_line(coverage_line(record)))
            append_file(self.folder.path / METRICS, line)
        self._metrics.update(line)
        self._metrics_size += len(line)
        failed = {"failed": record.failed} if record.failed else {}
        self.log("round", round=record.round, seconds=record.seconds, **failed)

    def save(self, at: Checkpoint) -> None:
        """Make a generation of the state, if there is none of this round."""
        before, digest = self._saved
        if before == at.state.round:
            return
        folder = self.folder.path / CHECKPOINTS
        header: dict[str, Any] = {
            "round": at.state.round,
            "parent_round": before,
            "parent": digest,
            "metrics_size": self._metrics_size,
            "metrics_sha256": self._metrics.hexdigest(),
            "fingerprint": self._fingerprint,
        }
        with self._advice():
            sync_file(self.folder.path / COVERAGE)
            sync_file(self.folder.path / METRICS)  # before the generation that counts its bytes
            kept = self._sheets.with_memories(self.folder.path / MEMORIES, at.state.round, at.memories)
            header["memories"] = kept.span and kept.span.as_header()
            digest = generations.save(folder, header, encode_checkpoint(replace(at, memories={})))
            self._saved, self._sheets = (at.state.round, digest), kept
            self._spans[at.state.round] = kept.span
            self._prune(at)

    def _prune(self, at: Checkpoint, sheets_at_once: int | None = sheets.AT_ONCE) -> None:
        """Give up generations that are no longer kept, and memories that only they needed."""
        folder, best = self.folder.path / CHECKPOINTS, None if at.best is None else at.best.round
        generations.prune(folder, at.state.round, self.settings.keep, best)
        rounds = generations.saved_rounds(folder)
        self._spans = {round: span for round, span in self._spans.items() if round in rounds}
        sheets.release(self.folder.path / MEMORIES, self._spans.values(), sheets_at_once)

    def finish(self, at: Checkpoint, save_weights: Callable[[RunFolder], None]) -> None:
        """The run has come to its end."""
        self.save(at)
        with self._advice():
            self._prune(at, sheets_at_once=None)
            generations.clean(self.folder.path / CHECKPOINTS)
            save_weights(self.folder)
        self.log("finished", round=at.state.round, best_round=at.best.round if at.best else None)

    @contextmanager
    def until_asked_to_stop(self) -> Iterator[None]:
        """Within this block Ctrl-C is noted, and ``stop_if_asked`` obeys."""
        with stop_requests() as self._request:
            yield

    @property
    def asked_to_stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._request.number != 0

    def stop_if_asked(self, at: Checkpoint) -> None:
        """Save and stop, if Ctrl-C was pressed during the round."""
        if self.asked_to_stop:
            self.save(at)
            self.log("stopped", round=at.state.round)
            raise Interrupted(self.folder.path, at.state.round, self._request.number)

    def state_of(self, round: int) -> ServerState:
        """The state of an earlier round that was kept."""
        generation = generations.load(self.folder.path / CHECKPOINTS, round)
        return decode_checkpoint(generation.payload, self._device).state

    def log(self, event: str, **fields: Any) -> None:
        """Add to ``events.jsonl``: everything that depends on the clock or on chance. Nothing is computed from it."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        with self._advice():
            append_file(self.folder.path / EVENTS, as_line(entry))

    @contextmanager
    def _advice(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            round = self._saved[0]
            if round is None:  # the folder is only being made
                raise
            raise StorageError(
                f"{error}. Round {round} is saved and nothing before it is lost: when there is room again, "
                f"`fedtailor resume {self.folder.path}` goes on from there"
            ) from error

    def close(self) -> None:
        """Let others write; a folder that never appeared is removed."""
        if self._at is None and self._found is None:
            remove_aside(self.folder.path)
        self.lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        # What breaks in the first round is the code of a network or a loss, as a rule: nothing is worth going on with.
        refused = (FedtailorError, KeyboardInterrupt, SystemExit)
        broken = kind is not None and (issubclass(kind, ClientsFailedError) or not issubclass(kind, refused))
        if broken and self._found is None and self._metrics_size == 0:
            remove_aside(self.folder.path)
