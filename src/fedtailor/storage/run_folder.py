"""The folder of a run, for reading: settings, one metrics row per round, final weights.

config.toml            the settings with every default filled in
environment.json       versions and machine, for the record
metrics.jsonl          one row per round; depends on the settings alone, so a resumed run has the same bytes
setup.json             tiers, data of each client, axes of every weight: for reports (see notes.py)
notes.jsonl            one line per round for reports: which units were trained, what the method has to show
coverage.jsonl         one line per round: which units were trained, by how many clients
events.jsonl           what happened when: starts, resumes, seconds of each round
checkpoints/           the last generations of the state and the best one (see generations.py)
diagnostics.safetensors  what the method has to show about the result, for a report; of methods that have such tables
weights.safetensors    the result; there when the run has come to its end
run.lock               locked while a run writes here
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedtailor.errors import FedtailorError
from fedtailor.record import Covered, RoundRecord
from fedtailor.storage.files import replace_file

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SETUP = "setup.json"
NOTES = "notes.jsonl"
COVERAGE = "coverage.jsonl"
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
DIAGNOSTICS = "diagnostics.safetensors"
WEIGHTS = "weights.safetensors"

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes; ``Journal`` holds the pen."""

    path: Path

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / WEIGHTS).is_file()

    def rows(self) -> list[Row]:
        """All metrics rows, each with the seconds that its round took."""
        file = self.path / METRICS
        if not file.is_file():
            raise FedtailorError(f"{self.path}: no {METRICS} there; expected the folder of a run")
        seconds = {
            event["round"]: event.get("seconds") for event in self.events() if event.get("event") == "round"
        }
        # A run that is writing at this moment may show half a line.
        lines = file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        rows = [json.loads(line) for line in lines]
        return [{**row, "seconds": row.get("seconds", seconds.get(row["round"], 0.0))} for row in rows]

    def records(self) -> list[RoundRecord]:
        """All rounds: their metrics, their coverage and their seconds."""
        file = self.path / COVERAGE
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        coverage = {
            line["round"]: [Covered(**covered) for covered in line["coverage"]]
            for line in map(_parsed, lines)
            if line
        }
        return [
            RoundRecord.from_row(row, coverage.get(row["round"], ()), row["seconds"]) for row in self.rows()
        ]

    def earlier_rows(self) -> list[Row]:
        """The rows of a run that may have been begun; none if it was not."""
        return self.rows() if (self.path / METRICS).is_file() else []

    def events(self) -> list[Row]:
        """What happened when. Lines that a crash cut short are left out."""
        file = self.path / EVENTS
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        return [event for event in map(_parsed, lines) if event]

    def notes(self) -> list[Row]:
        """What the rounds left for a report; a line that is being written is left out."""
        file = self.path / NOTES
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        return [note for note in map(_parsed, lines) if note]

    def save_weights(self, weights: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
        """Write the final weights: all of them, or none."""
        values = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        replace_file(self.path / WEIGHTS, [save(values, metadata={"ties": json.dumps(dict(ties))})])

    def load_weights(self) -> dict[str, Tensor]:
        """The final weights."""
        return _tensors(self.path / WEIGHTS)

    def save_diagnostics(self, tables: Mapping[str, Tensor]) -> None:
        """Write what a method has to show: all of it, or nothing."""
        values = {name: value.detach().cpu().contiguous() for name, value in tables.items()}
        replace_file(self.path / DIAGNOSTICS, [save(values)])

    def load_diagnostics(self) -> dict[str, Tensor]:
        """What the method had to show; nothing where it had not."""
        file = self.path / DIAGNOSTICS
        return _tensors(file) if file.is_file() else {}


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise FedtailorError(f"{file} cannot be read: {error}") from error


def _parsed(line: str) -> Row:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
