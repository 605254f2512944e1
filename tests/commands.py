"""A small config file, and the command called in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedtailor.cli.main import main

SMALL = """
name = "{name}"
seed = 3
rounds = {rounds}
clients_per_round = 3
evaluate_every = 1
[data]
clients = 5
limit = 100
[model]
name = "cnn"
channels = [4, 8]
[method]
name = "fedavg"
"""


def small_config(folder: Path, name: str = "small", rounds: int = 2) -> Path:
    """Write ``<name>.toml``: two rounds of three clients take about a second."""
    file = folder / f"{name}.toml"
    file.write_text(SMALL.format(name=name, rounds=rounds), encoding="utf-8")
    return file


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run ``fedtailor <words>``; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["fedtailor", *words])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
