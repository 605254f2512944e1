"""Tests here share networks that lie beside them, a finished run and its bundle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedtailor
from fedtailor.deploying.bundle import deploy
from fedtailor.deploying.wanted import Wanted

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def run() -> fedtailor.Run:
    from networks import finished

    return finished("cnn", "heterofl")


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory) -> Path:
    return deploy(run, Wanted(all_tiers=True), tmp_path_factory.mktemp("run") / "deploy").folder
