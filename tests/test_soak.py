"""The soak test (``make test-soak``) in short: one disturbed run equals its twin, and a run that is no twin is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.slow
def test_one_run_of_the_soak_test_equals_its_twin():
    command = [sys.executable, str(TOOLS / "soak.py"), "--minutes", "0.01", "--seed", "3", "--first", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 3; a full disk is ")
    assert "flado" in done.stdout
    assert "equals its twin" in done.stdout


@pytest.mark.slow
def test_a_client_more_or_less_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import soak
    import soak_runs

    monkeypatch.setattr(soak_runs, "ROUNDS", 2)
    habits = {f"{client}:1": "raise" for client in range(6)}
    soak_runs.go(tmp_path / "run", "fedavg", dict.fromkeys(habits, "nan"), 1, 0)
    soak_runs.go(tmp_path / "twin", "fedavg", habits, 1, 0)
    soak_runs.go(tmp_path / "other", "fedavg", {}, 1, 0)
    assert soak.refused(tmp_path / "run").keys() == soak.refused(tmp_path / "twin").keys() <= habits.keys()
    assert soak.difference(tmp_path / "run", tmp_path / "twin") == ""
    assert "round 2: merged is" in soak.difference(tmp_path / "run", tmp_path / "other")
