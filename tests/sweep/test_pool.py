"""Runs side by side: the same results as one by one, and nothing lost when everything is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import small_config
from fedtailor.errors import FedtailorError
from fedtailor.storage.files import in_use
from fedtailor.storage.run_folder import RunFolder
from fedtailor.sweep.plan import make_plan
from fedtailor.sweep.pool import jobs_for, run_all

PATIENCE_SECONDS = 900  # a loaded machine is no bug


def wait_until(condition) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_SECONDS, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    """Start a comparison in a process of its own; none outlives its test."""
    started: list[subprocess.Popen] = []

    def begin(*words: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "fedtailor",
            "compare",
            "pool.toml",
            "--methods",
            "fedavg,heterofl",
            *words,
        ]
        pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def snapshot(folder: RunFolder) -> dict[Path, tuple[int, bytes]]:
    files = [file for file in folder.path.rglob("*") if file.is_file()]
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_redoes_nothing(tmp_path, start):
    """kill -9 of the parent while some runs are finished, some running, some not begun."""
    small_config(tmp_path, "pool", rounds=8)
    runs = make_plan(tmp_path / "pool.toml", "fedavg,heterofl", 2, [], [], tmp_path / "runs").runs
    first = start("--seeds", "2", "--jobs", "2")
    wait_until(lambda: any(run.folder.finished for run in runs) or first.poll() is not None)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not any(in_use(run.folder.path) for run in runs))  # its workers died with it
    done = [run for run in runs if run.folder.finished]
    assert 0 < len(done) < len(runs), "killed too late to show anything"
    before = {run.folder.path: snapshot(run.folder) for run in done}
    begun = [run for run in runs if run.folder.path.exists() and run not in done]

    second = start("--seeds", "2", "--jobs", "2")
    shown, told = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 0, told
    assert told.count("finished before") == len(done)
    assert told.count("interrupted before") == len(begun)
    assert {path: snapshot(RunFolder(path)) for path in before} == before
    assert all(run.folder.finished for run in runs)
    assert "±" in shown

    alone = start("--seeds", "2", "--jobs", "1", "--runs", "other")
    alone.communicate(timeout=PATIENCE_SECONDS)
    for run in runs:  # the same bytes as without a kill, one by one, in one process
        twin = tmp_path / "other/pool" / run.folder.path.name / "metrics.jsonl"
        assert twin.read_bytes() == (run.folder.path / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_asked_to_stop_it_finishes_the_rounds_and_says_how_to_go_on(tmp_path, start):
    small_config(tmp_path, "pool", rounds=500)
    runs = make_plan(tmp_path / "pool.toml", "fedavg,heterofl", 1, [], [], tmp_path / "runs").runs
    process = start("--jobs", "2")
    wait_until(lambda: all(run.folder.path.exists() and run.folder.records() for run in runs))
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "the same command" in told
    for run in runs:
        assert not in_use(run.folder.path)
        assert len(list((run.folder.path / "checkpoints").iterdir())) >= 1
        records = run.folder.records()
        assert f"{records[-1].round:08d}.checkpoint" in os.listdir(run.folder.path / "checkpoints")


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_stops_no_other(tmp_path):
    small_config(tmp_path, "pool", rounds=1)
    grid = ["clients_per_round=99,3"]
    plan = make_plan(tmp_path / "pool.toml", "fedavg", 1, grid, [], tmp_path / "runs")
    states = []
    with pytest.raises(
        FedtailorError, match=r"1 of 2 runs failed(.|\n)*clients_per_round=99.*at most 5"
    ) as caught:
        run_all(
            plan.runs, 2, lambda run, record: None, lambda run, state: states.append((run.cell[0][1], state))
        )
    assert caught.value.exit_code == 2
    assert ("3", "finished") in states
    assert ("99", "failed") in states
    assert plan.runs[1].folder.finished


def test_as_many_at_a_time_as_there_are_cores_and_runs(tmp_path, monkeypatch):
    small_config(tmp_path, "pool", rounds=1)
    runs = make_plan(tmp_path / "pool.toml", "fedavg", 4, [], ["threads=2"], tmp_path).runs
    monkeypatch.setattr("fedtailor.sweep.pool.available_cores", lambda: 6)
    assert jobs_for(runs, None) == 3
    assert jobs_for(runs[:1], None) == 1
    assert jobs_for(runs, 2) == 2
    assert jobs_for(runs, 9) == 4
