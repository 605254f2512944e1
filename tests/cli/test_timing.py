"""``fedtailor run --profile``: phases add up to the rounds, in one process and with workers, and change no bit."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from commands import call, small_config
from fedtailor.cli.timing import MEANING, OTHER, Lap, Times
from fedtailor.steps import PHASES, Stopwatch, in_phase, measured_by, phase
from helpers import differing, final_weights


@pytest.mark.parametrize("workers", [0, 2])
def test_the_phases_of_a_round_are_the_round(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("run", str(small_config(tmp_path, rounds=3)), "--json")
    timed = ("--set", "name=timed", "--set", f"engine.workers={workers}", "--profile")
    assert call(monkeypatch, *words, *timed) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    for part, rounds in (("first", 1), ("others", 2)):
        found = profile[part]
        assert found["rounds"] == rounds
        assert 1 <= found["processes"] <= max(1, workers)  # one may be given all, if the other starts late
        assert set(found["phases"]) == {*PHASES, OTHER} == set(MEANING)
        assert found["steps"] > 0
        assert found["times_bare_steps"] > 1
        assert (found["phases"]["transfer"] > 0) == (found["phases"]["steps"] == 0) == (workers > 0)
    first = profile["first"]
    assert sum(first["phases"].values()) == pytest.approx(first["seconds"], rel=0.01)
    assert call(monkeypatch, *words, "--set", "name=plain", "--set", "engine.workers=0") == 0
    assert "profile" not in json.loads(capsys.readouterr().out)
    assert not differing(final_weights(tmp_path / "runs/timed"), final_weights(tmp_path / "runs/plain"))


def test_a_phase_within_another_counts_once() -> None:
    """The clock goes on by one whenever it is looked at, which it is at both ends of a phase."""
    watch = Stopwatch(clock=map(float, count()).__next__)
    with measured_by(watch), phase("check"):
        for _ in in_phase("train", range(2)):
            with phase("steps"):
                pass
    assert watch.lap() == {
        "train": 3.0,
        "steps": 2.0,
        "check": 6.0,
    }  # the third train finds that all have come
    with phase("merge"):
        pass  # nobody measures any more
    assert not watch.lap()


def test_bare_steps_are_spread_over_the_processes() -> None:
    lap = Lap(3.0, {"train": 2.0, "check": 0.5}, [{"steps": 1.5, "train": 0.1}, {"steps": 0.5}])
    assert (lap.steps, lap.bare, lap.shares[OTHER]) == (2.0, 1.0, 0.5)
    times = Times(Stopwatch(), 0.0, [lap])
    assert times.value()["first"]["times_bare_steps"] == 3.0
    assert "others" not in times.value()
