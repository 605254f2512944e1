"""One file of results for each paper: what was run, with which versions and seeds, and what came out.

    {"about": ..., "experiments": {name: {
        "commands": [the calls that make its runs],
        "versions": [those of its runs],
        "seeds": [...],
        "accuracy": {method: {tier: {"mean": ..., "deviation": ...}}},      over the seeds, where there are several
        "runs": {method: {seed: figures}}}}}

The file is replaced as a whole after each run, so an interrupted script loses nothing that had ended.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedtailor.storage.files import replace_file

ABOUT = (
    "Accuracy in per cent; bytes of all clients, both ways; macs: multiply-accumulates of training; "
    "seconds of run time. Commands run from the root of the repository."
)
WIDEST = 118  # characters: what fits is written on one line

Result = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The file, and how a run gets into it."""

    file: Path

    def experiments(self) -> dict[str, Result]:
        """All that is there, by the name of the experiment."""
        if not self.file.exists():
            return {}
        status = self.file.stat()
        return _read(self.file, status.st_mtime_ns, status.st_size, status.st_ino)

    def runs(self, experiment: str) -> dict[str, dict[str, Result]]:
        """The runs of an experiment that are there: method -> seed -> figures."""
        found: dict[str, dict[str, Result]] = self.experiments().get(experiment, {}).get("runs", {})
        return found

    def has(self, experiment: str, method: str, seed: int) -> bool:
        """Whether this run is there."""
        return str(seed) in self.runs(experiment).get(method, {})

    def add(
        self, experiment: str, method: str, seed: int, figures: Result, made: Mapping[str, list[str]]
    ) -> None:
        """Write a run down; ``made`` holds the experiment's ``commands`` and the run's ``versions``."""
        with self._alone():
            every = dict(self.experiments())
            entry = every.get(experiment, {})
            versions = list(dict.fromkeys([*entry.get("versions", []), *made["versions"]]))
            seeds = sorted({*entry.get("seeds", []), seed})
            accuracy, runs = dict(entry.get("accuracy", {})), dict(entry.get("runs", {}))
            runs[method] = {**runs.get(method, {}), str(seed): figures}
            if len(runs[method]) > 1:
                accuracy[method] = over_seeds(runs[method])
            every[experiment] = {
                "commands": made["commands"],
                "versions": versions,
                "seeds": seeds,
                "accuracy": accuracy,
                "runs": runs,
            }
            self.write(every)

    def write(self, experiments: Mapping[str, Result]) -> None:
        """Replace the file."""
        text = laid_out({"about": ABOUT, "experiments": experiments})
        replace_file(self.file, [f"{text}\n".encode()])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Scripts side by side must not undo each other's additions: the folder is locked for the moment."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


@lru_cache(maxsize=1)
def _read(file: Path, *_version: int) -> dict[str, Result]:
    """What a version of the file holds; a script asks for it hundreds of times before it runs anything."""
    found: dict[str, Result] = json.loads(file.read_text(encoding="utf-8"))["experiments"]
    return found


def over_seeds(runs: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    """Mean and sample deviation of every accuracy that all of several seeds have."""
    every = [figures.get("accuracy", {}) for figures in runs.values()]
    shared = [name for name in every[0] if all(name in each for each in every)]
    return {
        name: {"mean": round(fmean(values), 4), "deviation": round(stdev(values), 4)}
        for name, values in ((name, [each[name] for each in every]) for name in shared)
    }


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON with a line for each part that fits on one, and for each row of numbers: a run is a few lines long.

    >>> laid_out({"a": [1, 2]})
    '{"a": [1, 2]}'
    """
    line = json.dumps(value, ensure_ascii=False)
    numbers = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    if indent + len(line) <= WIDEST or numbers or not isinstance(value, dict | list):
        return line
    space, inner = " " * indent, " " * (indent + 1)
    if isinstance(value, list):
        rows = [f"{inner}{laid_out(each, indent + 1)}" for each in value]
        return "[\n" + ",\n".join(rows) + f"\n{space}]"
    rows = [f"{inner}{json.dumps(key)}: {laid_out(each, indent + 1)}" for key, each in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{space}}}"
