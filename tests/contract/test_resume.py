"""A run that was interrupted, at any moment and in any way, ends as if nothing had happened. For every method."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_every_method import METHODS_SEEN, SMALLEST
from torch import nn

import fedtailor
from fedtailor.cli.main import main
from fedtailor.client.local_training import LocalTraining
from fedtailor.method import Method
from fedtailor.methods.registry import get_method, method_names
from fedtailor.record import RoundRecord
from fedtailor.storage.run_folder import RunFolder
from helpers import image_data, kind_of, slow_if, tiny_adapted, tiny_cnn, tiny_deep

ROUNDS = 4
BUILDERS = {"plain": tiny_cnn, "adapted": tiny_adapted, "deep": tiny_deep}


class CutError(Exception):
    """Stands for whatever ended the process."""


@dataclass(frozen=True)
class Remembering(Method):
    """Uses every kind of memory that there is, and a layout of tensors that must not matter."""

    def init(self, model: Any) -> Any:
        state = super().init(model)
        return replace(
            state,
            memory={"answers": [], 5: (1, None, -0.0), "best": float("-inf"), "mean": torch.zeros(2, 3).t()},
        )

    def prepare(self, task: Any, data: Any, model: Any) -> Any:
        times = task.memory.get("times", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        assert times.is_contiguous() == (task.memory_round >= 0)
        return replace(
            task, memory={"times": (times + task.memory_round).to(memory_format=torch.channels_last)}
        )

    def loss(self, outputs: Any, weights: Any, batch: Any, task: Any, model: Any) -> Any:
        return super().loss(outputs, weights, batch, task, model) * (
            1 + task.memory["times"].mean().abs() / 100
        )

    def merge(self, state: Any, updates: Any, model: Any) -> Any:
        merged = super().merge(state, updates, model)
        mean = state.memory["mean"] + sum(update.memory["times"].mean() for update in updates)
        answers = [*state.memory["answers"], tuple(update.client for update in updates)]
        assert state.memory["mean"].is_contiguous()
        return replace(
            merged, memory={**state.memory, "answers": answers, "mean": (mean + 1).t().contiguous().t()}
        )

    def observe(self, state: Any, evaluation: Any) -> Any:
        best = max(state.memory["best"], *(tier["accuracy"] for tier in evaluation.values()))
        return replace(state, memory={**state.memory, "best": best})


def chosen(name: str) -> Method:
    local = LocalTraining(batch_size=4, momentum=0.9, weight_decay=0.01, schedule="cosine")
    if name == "remembering":
        return Remembering(local=local)
    return get_method(name)(**{"local": local, **SMALLEST[name]})


def train(name: str, folder: Path, **settings: Any) -> fedtailor.Run:
    """Everything is built anew, as in a new process."""
    return fedtailor.train(
        BUILDERS[kind_of(name)](), image_data((6, 5, 7, 4)), "uniform-2", chosen(name),
        rounds=ROUNDS, clients_per_round=3, evaluate_every=2, seed=5, folder=folder, engine={"workers": 0}, **settings,
    )  # fmt: skip


def comparable(path: Path) -> dict[str, bytes]:
    """Every file but the log of what happened when: weights, metrics, and the last generations of the state."""
    files = [
        file for file in path.rglob("*") if file.is_file() and file.name not in ("events.jsonl", "run.lock")
    ]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@cache
def uninterrupted(name: str, folder: Path) -> dict[str, bytes]:
    train(name, folder / name)
    return comparable(folder / name)


def test_every_registered_method_is_seen():
    assert sorted(SMALLEST) == method_names()
    assert len(method_names()) == METHODS_SEEN


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


STAGED = ("apfl", "flado", "ofa-fl", "remembering")  # rounds differ, or much is remembered
MIDDLE = 2  # of others this round is tried; after every round all of them are, below


@pytest.mark.parametrize(
    ("name", "round"),
    [
        pytest.param(name, round, marks=[pytest.mark.slow] if name not in STAGED and round != MIDDLE else [])
        for name in (*method_names(), "remembering")
        for round in range(1, ROUNDS + 1)
    ],
)
def test_interrupted_after_any_round_and_resumed(name, round, references, tmp_path):
    def cut(record: RoundRecord) -> None:
        if record.round == round:
            raise CutError

    with pytest.raises(CutError):
        train(name, tmp_path / "run", on_round=cut)
    assert not RunFolder(tmp_path / "run").finished
    run = train(name, tmp_path / "run", resume=True)
    assert [record.round for record in run.history] == list(range(1, ROUNDS + 1))
    expected = uninterrupted(name, references)
    assert {"weights.safetensors", "metrics.jsonl", f"checkpoints/{ROUNDS:08d}.checkpoint"} <= expected.keys()
    assert comparable(tmp_path / "run") == expected


@pytest.mark.parametrize("name", [*method_names(), "remembering"])
def test_interrupted_after_every_round(name, references, tmp_path):
    """Never more than one round at a time."""

    def cut(_record: RoundRecord) -> None:
        raise CutError

    for _ in range(ROUNDS):
        with pytest.raises(CutError):
            train(name, tmp_path / "run", on_round=cut, resume=True)
    train(name, tmp_path / "run", resume=True)
    assert comparable(tmp_path / "run") == uninterrupted(name, references)


SERVED = ("fedavg", "fjord", "flado", "splitmix")  # others do the same with what the server keeps


@pytest.mark.parametrize(
    "name",
    [
        name if name in SERVED else slow_if(name, name)
        for name in method_names()
        if get_method(name).shared_merge
    ],
)
def test_what_the_server_keeps_survives_an_interruption(name, tmp_path):
    """Moments, counts and the average over rounds, of every method that merges by the shared rule; AdamW on clients."""
    settings = {
        "training": {"optimiser": "adamw", "lr": 0.01, "momentum": 0.0, "accumulate": 2, "warmup_steps": 1},
        "server": {"optimiser": "adam", "lr": 0.01, "average": 0.9},
    }

    def cut(record: RoundRecord) -> None:
        if record.round == ROUNDS - 1:
            raise CutError

    whole = train(name, tmp_path / "whole", **settings)
    with pytest.raises(CutError):
        train(name, tmp_path / "run", on_round=cut, **settings)
    train(name, tmp_path / "run", resume=True, **settings)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")
    assert whole.last is not None
    assert whole.last.state.moments.keys() >= {"first", "second", "steps", "average"}


def test_a_module_that_lies_otherwise_in_memory_is_resumed_too(tmp_path):
    """Channels-last weights: what is never trained keeps its layout in one run and loses it in the other."""

    def run(folder: Path, **settings: Any) -> fedtailor.Run:
        module = tiny_cnn().to(memory_format=torch.channels_last)
        assert isinstance(module, nn.Sequential)
        module[4].weight.requires_grad_(False)
        data = image_data((6, 5, 7, 4))
        return fedtailor.train(
            module,
            data,
            "equal",
            "fedavg",
            rounds=3,
            clients_per_round=2,
            engine={"workers": 0},
            folder=folder,
            **settings,
        )

    def cut(record: RoundRecord) -> None:
        raise CutError

    run(tmp_path / "whole")
    with pytest.raises(CutError):
        run(tmp_path / "run", on_round=cut)
    run(tmp_path / "run", resume=True)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")


# kill -9

CONFIG = """
name = "run"
seed = 11
rounds = 20
clients_per_round = 3
evaluate_every = 4
[data]
clients = 6
limit = 200
[model]
name = "cnn"
channels = [8, 16]
[fleet]
name = "uniform-3"
[engine]
workers = 0
[method]
name = "heterofl"
[training]
lr = 0.05
momentum = 0.9
batch_size = 16
[server]
optimiser = "adam"
average = 0.9
"""


class Command:
    """The real command in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fedtailor", *words]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def finish(self) -> None:
        _, shown = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, shown.decode()


class Fork(Command):
    """The same in a copy of this process, which has loaded everything already."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.child = os.fork()
        if self.child == 0:
            code = 1
            try:
                os.chdir(folder)
                sys.argv = ["fedtailor", *words]
                main()
                code = 0
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                os._exit(code)

    def kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)

    def finish(self) -> None:
        _, status = os.waitpid(self.child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def rounds_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_until(folder: Path, moment: float) -> None:
    """Wait for a moment of a run, counted in rounds: 7.4 is 40 % of a round's time after the seventh."""
    whole = int(moment)
    wait_for(folder.exists)
    begin = time.perf_counter()
    wait_for(lambda: rounds_done(folder) >= whole)
    pace = (time.perf_counter() - begin) / whole if whole else 0.05
    time.sleep((moment - whole) * pace)


def kill_and_resume(count: int, tmp_path: Path, seed: int, start: type[Command]) -> dict[str, Any]:
    """Kill runs at random moments between their first byte and their last, and resume each to its end."""
    (tmp_path / "config.toml").write_text(CONFIG)
    start(tmp_path, "run", "config.toml", "--runs", "whole").finish()
    expected = comparable(tmp_path / "whole/run")
    draw, rounds, identical = random.Random(seed), [], 0
    for number in range(count):
        process = start(tmp_path, "run", "config.toml", "--runs", f"killed{number}")
        folder = tmp_path / f"killed{number}/run"
        wait_until(folder, draw.uniform(0, 20))
        process.kill()
        rounds.append(sum(event["event"] == "round" for event in RunFolder(folder).events()))
        start(tmp_path, "resume", str(folder)).finish()
        identical += comparable(folder) == expected
        shutil.rmtree(folder.parent)
    return {
        "kills": count,
        "identical": identical,
        "rounds_done_when_killed": sorted(rounds),
        "killed_after_the_last_round": rounds.count(20),
    }


def test_kill_9_at_random_moments(tmp_path):
    figures = kill_and_resume(2, tmp_path, 1, Fork)
    assert figures["identical"] == 2


@pytest.mark.slow
def test_kill_9_at_fifty_random_moments(tmp_path):
    figures = kill_and_resume(50, tmp_path, 2, Command)
    assert figures["identical"] == 50
    assert len(set(figures["rounds_done_when_killed"])) > 10
