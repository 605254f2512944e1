"""What a run folder reveals: names and label counts of clients only if asked for, files for their owner alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedtailor
from fedtailor.report.targets import guessing
from helpers import tiny_mlp, vectors


@pytest.fixture(params=[False, True], ids=["by default", "asked for"])
def folder(request, tmp_path) -> tuple[bool, Path]:
    x, y = vectors(40).columns
    data = {
        name: (x[i : i + 10], y[i : i + 10])
        for i, name in ((0, "alice"), (10, "bob"), (20, "carol"), (30, "dan"))
    }
    fedtailor.train(
        tiny_mlp(), data, "equal", "fedavg", rounds=1, folder=tmp_path / "run", progress=False,
        report={"client_details": request.param},
    )  # fmt: skip
    return request.param, tmp_path / "run"


def test_clients_are_named_only_if_asked_for(folder):
    asked, path = folder
    texts = b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
    assert (b"alice" in texts) == asked
    data = json.loads((path / "setup.json").read_text(encoding="utf-8"))["data"]
    assert ("rows" in data) == asked
    assert guessing({"data": data}) is not None
    if not asked:
        assert np.sum(data["label_counts"]) > 0


def test_files_are_their_owners_alone(folder):
    _, path = folder
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in path.rglob("*") if file.is_file()}
    assert set(modes.values()) == {"0o600"}, modes
