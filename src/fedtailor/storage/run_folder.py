"""The folder of a run, for reading: settings, the record of each round, final weights.

config.toml            the settings with every default filled in
call.json              of a run that Python started: what ``train`` was given, as far as words can say it
environment.json       versions and machine, for the record
metrics.jsonl          one row per round; depends on the settings alone, so a resumed run has the same bytes
setup.json             tiers, data of each client, axes of every weight: for reports (see run/describing.py)
coverage.jsonl         one line per round for reports: which channels and tensors the merged updates held
events.jsonl           what happened when: starts, resumes, seconds of each round
checkpoints/           the last generations of the state and the best one (see generations.py)
memories/              what clients keep for themselves, each memory once (see sheets.py); of methods that need it
diagnostics.safetensors  what the method has to show about the result, for a report; of methods that have such tables
confusion.json         per tier, how often each class was taken for which; of finished runs whose answers are classes
weights.safetensors    the result; there when the run has come to its end
run.lock               locked while a run writes here

PyTorch is loaded only where tensors are read or written, so that folders can be listed at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from fedtailor.errors import CorruptError, FedtailorError, one_line
from fedtailor.record import RoundRecord, Row
from fedtailor.storage.files import DEVICES, in_use, replace_file
from fedtailor.storage.rows import (
    as_text,
    covered_by_round,
    events_by_round,
    is_devices,
    is_setup,
    parsed,
    record_of,
    table_in,
)

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.toml"
CALL = "call.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SETUP = "setup.json"
COVERAGE = "coverage.jsonl"
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
MEMORIES = "memories"
DIAGNOSTICS = "diagnostics.safetensors"
CONFUSION = "confusion.json"
WEIGHTS = "weights.safetensors"
COMPARISON = "comparison.json"  # beside the runs of a comparison: which they are

# Key of ``setup.json``: of a run that was started from Python, where no config says them
SETTINGS = "settings"


@dataclass(frozen=True)
class ReportSettings:
    """What a run folder tells for reports. It changes no result."""

    client_details: bool = False
    """Write names and label counts of single clients into setup.json; without it, what all have together."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes; ``Journal`` holds the pen."""

    path: Path

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / WEIGHTS).is_file()

    @property
    def state(self) -> str:
        """How the run stands: finished, running or interrupted."""
        return "finished" if self.finished else "running" if in_use(self.path) else "interrupted"

    def records(self) -> list[RoundRecord]:
        """What every round left: its row, with its coverage and the seconds that it took."""
        file = self.path / METRICS
        if not file.is_file():
            raise FedtailorError(f"{self.path}: no {METRICS} there; expected the folder of a run")
        found, problem = self._read()
        if problem:
            raise CorruptError(f"{file} is damaged: {problem}")
        return found

    def _read(self) -> tuple[list[RoundRecord], str]:
        """The records up to the first line that is none, and what is wrong with that."""
        try:
            data = (self.path / METRICS).read_bytes()
        except OSError as error:
            return [], error.strerror or str(error)
        # A run that is writing at this moment may show half a line.
        ended = data.rpartition(b"\n")[0]
        lines = ended.split(b"\n") if ended else []
        coverage, events = covered_by_round(self.coverage()), events_by_round(self.events())
        records: list[RoundRecord] = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(record_of(line.decode(), coverage, events))
            except (ValueError, RecursionError) as error:
                return records, f"line {number}: {one_line(str(error))}"
        return records, ""

    def setup(self) -> Row:
        """What the run started from, for reports; nothing where the folder does not say."""
        found = self._values(SETUP)
        if not is_setup(found):
            raise CorruptError(f"{self.path / SETUP} is damaged: expected what a run started from")
        return found

    def confusion(self) -> Row:
        """Which classes the result takes for which; nothing where the folder does not say."""
        return self._values(CONFUSION)

    def devices(self) -> Row:
        """Who is there, of a run on other machines; nothing of any other."""
        found = self._values(DEVICES)
        if found and not is_devices(found):
            raise CorruptError(f"{self.path / DEVICES} is damaged: expected who is there and what they spent")
        return found

    def _values(self, name: str) -> Row:
        return table_in(self.path / name)

    def earlier_records(self) -> list[RoundRecord]:
        """The records of a run that may have been begun, as far as they can be read; none if it was not."""
        return self._read()[0] if (self.path / METRICS).is_file() else []

    def events(self) -> list[Row]:
        """What happened when."""
        return self._lines(EVENTS)

    def coverage(self) -> list[Row]:
        """Which channels and tensors the merged updates of each round held."""
        return self._lines(COVERAGE)

    def _lines(self, name: str) -> list[Row]:
        """The lines of a file; those that a crash cut short, or that are being written, are left out."""
        file = self.path / name
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []
        return [found for found in map(parsed, lines) if found]

    def save_weights(
        self, weights: Mapping[str, Tensor], ties: Mapping[str, str], inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Write the final weights, all of them or none; ``inputs`` says what is done to raw inputs before."""
        from safetensors.torch import save

        values = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        # One entry: safetensors writes several in any order, and the same run has to leave the same bytes.
        about = json.dumps({"ties": dict(ties), "inputs": inputs or {}})
        replace_file(self.path / WEIGHTS, [save(values, metadata={"about": about})])

    def save_diagnostics(self, tables: Mapping[str, Tensor]) -> None:
        """Write what a method has to show: all of it, or nothing."""
        from safetensors.torch import save

        values = {name: value.detach().cpu().contiguous() for name, value in tables.items()}
        replace_file(self.path / DIAGNOSTICS, [save(values)])

    def save_confusion(self, found: Mapping[str, Any]) -> None:
        """Write which classes the result takes for which."""
        replace_file(self.path / CONFUSION, [as_text(found).encode() + b"\n"])

    def load_diagnostics(self) -> dict[str, Tensor]:
        """What the method had to show; nothing where it had not."""
        file = self.path / DIAGNOSTICS
        return _tensors(file) if file.is_file() else {}


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise FedtailorError(f"{file} cannot be read: {error}") from error
