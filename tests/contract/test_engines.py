"""Every engine gives the same bits for every method: without workers, with one, with two, interrupted, and killed.

The fast tests serve all methods with one pool (see ``Several``). The slow ones start real runs with folders of their
own and kill them, or their workers, at random moments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from test_every_method import DATA, FLEET, METHODS_SEEN, SMALLEST, model_of, smallest

from fedtailor.engines.in_process import InProcess
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.methods.registry import method_names
from fedtailor.record import Row
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings
from fedtailor.storage.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from helpers import differing, kind_of, setup_of, slow_if
from odd_methods import As, Several

every_method = pytest.mark.parametrize("name", method_names())
ROUNDS = 4
LIKE_OTHERS = (
    "apfl", "flado", "fjord", "flanc", "hetlora", "nefl", "ofa-fl", "scalefl",
    "efd", "fedavg", "fedcs", "federated-dropout", "fedpa", "fedrolex", "feduniform", "fiarse", "flexlora",
    "splitmix", "tailor", "uniprob",
)  # fmt: skip


def test_every_registered_method_is_covered():
    assert sorted(SMALLEST) == method_names()
    assert len(method_names()) == METHODS_SEEN


class Pools:
    """Pools of one and of two workers for each network, started when they are first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._pools = stack, dict[tuple[int, str], WorkerPool]()

    def of(self, name: str, workers: int) -> WorkerPool:
        key = (workers, kind_of(name))
        if key not in self._pools:
            served = {each: smallest(each) for each in method_names() if kind_of(each) == key[1]}
            pool = WorkerPool(Several(methods=served), model_of(name), DATA, workers)
            self._pools[key] = self._stack.enter_context(pool)
            pool.start()
        return self._pools[key]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(stack)


def rounds(
    name: str, engine: Any, until: int = ROUNDS, start: Checkpoint | None = None
) -> tuple[Checkpoint, list[Row]]:
    rows: list[Row] = []
    setup = setup_of(smallest(name), model_of(name), DATA, FLEET, RoundSettings(until, 3, 2))
    return run_rounds(setup, engine, lambda record, _at: rows.append(record.as_row()), start), rows


@cache
def reference(name: str) -> tuple[Checkpoint, list[Row]]:
    return rounds(name, InProcess(smallest(name), model_of(name), DATA))


def assert_same(one: tuple[Checkpoint, list[Row]], other: tuple[Checkpoint, list[Row]]) -> None:
    """Weights, all that the server and the clients remember, and the metrics as they are written."""
    assert differing(one[0].state.weights, other[0].state.weights) == set()
    assert [bytes(piece) for piece in encode_checkpoint(one[0])] == [
        bytes(piece) for piece in encode_checkpoint(other[0])
    ]
    assert json.dumps(one[1]) == json.dumps(other[1])


@every_method
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_give_the_bits_of_one_process(name, workers, pools):
    assert_same(reference(name), rounds(name, As(pools.of(name, workers), name)))


def saved(at: Checkpoint) -> Checkpoint:
    return decode_checkpoint(b"".join(bytes(piece) for piece in encode_checkpoint(at)))


@pytest.mark.parametrize("name", [slow_if(name, *LIKE_OTHERS) for name in method_names()])
def test_interrupted_and_resumed_on_another_engine(name, pools):
    """One worker, then two, then none: what a run goes on with does not matter either."""
    start, first = rounds(name, As(pools.of(name, 1), name), 2)
    second, rows = rounds(name, As(pools.of(name, 2), name), 3, saved(start))
    third, last = rounds(name, InProcess(smallest(name), model_of(name), DATA), ROUNDS, saved(second))
    # Round 3 was the last one of its part, so it was evaluated; the whole run evaluates rounds 2 and 4.
    whole, lines = reference(name)
    assert differing(whole.state.weights, third.state.weights) == set()
    assert json.dumps([first[0], last[-1] | {"best_round": 0}]) == json.dumps(
        [lines[0], lines[3] | {"best_round": 0}]
    )
    assert rows[0]["train_loss"] == lines[2]["train_loss"]


@pytest.mark.parametrize("name", [slow_if(name, *LIKE_OTHERS) for name in method_names()])
def test_a_worker_killed_in_the_middle_changes_nothing(name, pools):
    engine = Killing(As(pools.of(name, 2), name), pools.of(name, 2))
    assert_same(reference(name), rounds(name, engine))
    assert engine.killed == 1


class Killing:
    """An engine of which one worker is killed as soon as the first answer is there."""

    def __init__(self, engine: Any, pool: WorkerPool) -> None:
        self.engine, self.pool, self.killed = engine, pool, 0

    def run(self, tasks):
        for answer in self.engine.run(tasks):
            if answer is not None and not self.killed:
                os.kill(self.pool.pids[0], signal.SIGKILL)
                self.killed += 1
            yield answer

    def measure(self, deployed, action="evaluate"):
        return self.engine.measure(deployed, action)


# Real runs, with folders and processes of their own

NETWORKS = Path(__file__).parents[1] / "odd_networks.py"

CONFIG = """
name = "run"
rounds = {rounds}
clients_per_round = 4
evaluate_every = 3
threads = 1
[data]
dataset = "digits"
clients = 8
[model]
{network}
[fleet]
name = "uniform-2"
[method]
name = "{method}"
{settings}
[training]
batch_size = 16
[engine]
workers = {workers}
"""


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "fedtailor", *words]


def write_config(folder: Path, method: str, workers: int, rounds: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # Tables name groups of the small model of the other tests; JSON writes all other values as TOML does.
    plain = {key: value for key, value in SMALLEST[method].items() if not isinstance(value, dict)}
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in plain.items())
    path = folder / "config.toml"
    own = f'name = "{NETWORKS}:{kind_of(method)}"'
    network = 'name = "cnn"\nchannels = [8, 16]' if kind_of(method) == "plain" else own
    path.write_text(
        CONFIG.format(method=method, settings=settings, network=network, workers=workers, rounds=rounds)
    )
    return path


def finish(folder: Path, method: str, workers: int) -> float:
    """A run from start to end; returns its seconds."""
    started = time.monotonic()
    path = write_config(folder, method, workers)
    subprocess.run(
        command(folder, "run", str(path), "--runs", str(folder)), check=True, capture_output=True, timeout=600
    )
    return time.monotonic() - started


def result_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    return load_file(folder / "run" / "weights.safetensors"), (folder / "run" / "metrics.jsonl").read_bytes()


def workers_of(pid: int) -> list[int]:
    """The children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def survive(folder: Path, method: str, seconds: float, generator: np.random.Generator) -> dict[str, int]:
    """Start a run, kill it or one of its workers at a random moment, resume, until it is through."""
    path = write_config(folder, method, 2)
    counts = {"runs": 0, "workers": 0}
    words = ["run", str(path), "--runs", str(folder)]
    target = str(generator.choice(["runs", "workers"]))
    moment = float(generator.uniform(0, seconds))
    for attempt in range(3):
        process = subprocess.Popen(command(folder, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if attempt == 0:
            time.sleep(moment)
            children = workers_of(process.pid)
            if target == "workers" and children:
                os.kill(children[0], signal.SIGKILL)
                counts["workers"] += 1
            elif process.poll() is None:
                process.kill()
                counts["runs"] += 1
                deadline = time.monotonic() + 5
                while any(map(alive, children)) and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert not any(map(alive, children)), "workers outlived the run by five seconds"
        _, errors = process.communicate(timeout=600)
        if process.returncode == 0:
            return counts
        assert process.returncode == -signal.SIGKILL, errors.decode()
        started = (folder / "run").exists()
        words = ["resume", str(folder / "run")] if started else words
    raise AssertionError("the run did not come through")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_killed_at_a_random_moment(number, tmp_path, tmp_path_factory):
    """Twenty moments over all methods in turn: of the run, or of one of its workers."""
    method = method_names()[number % len(method_names())]
    whole, seconds = reference_run(method, tmp_path_factory)
    survive(tmp_path / "killed", method, seconds, np.random.default_rng(number))
    weights, metrics = result_of(tmp_path / "killed")
    assert differing(weights, whole[0]) == set()
    assert metrics == whole[1]


REFERENCES: dict[str, Any] = {}


def reference_run(method: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, float]:
    """The run without workers and without faults, and how long one with workers takes."""
    if method not in REFERENCES:
        folder = tmp_path_factory.mktemp(method)
        finish(folder / "here", method, 0)
        seconds = finish(folder / "there", method, 2)
        here, there = result_of(folder / "here"), result_of(folder / "there")
        assert differing(here[0], there[0]) == set()
        assert here[1] == there[1]
        REFERENCES[method] = here, seconds
    return REFERENCES[method]


@pytest.mark.slow
def test_no_worker_outlives_a_run_that_was_killed(tmp_path):
    path = write_config(tmp_path, "fedavg", 2, rounds=10_000)
    process = subprocess.Popen(
        command(tmp_path, "run", str(path), "--runs", str(tmp_path)),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 120
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.1)
        children = workers_of(process.pid)
        assert len(children) == 2
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 5
    while any(map(alive, children)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(alive, children))
