"""Runs side by side, each in a process of its own with one run at a time.

What a run has done is read from its folder, never from its process: a killed comparison loses nothing that was saved.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from fedtailor.config import to_toml
from fedtailor.engines.settings import FOR_TRAINING, available_cores
from fedtailor.errors import CorruptError, FedtailorError, LockedError, QuorumError, StorageError
from fedtailor.record import RoundRecord
from fedtailor.storage.interrupt import Request, stop_requests
from fedtailor.storage.run_folder import METRICS
from fedtailor.sweep.plan import PlannedRun

LOOK_SECONDS = 0.2  # how often folders and processes are looked at
KINDS = (CorruptError, LockedError, QuorumError, StorageError)
OnRound = Callable[[PlannedRun, RoundRecord], None]
OnState = Callable[[PlannedRun, str], None]  # "started", "finished", "failed" or "stopped"


def jobs_for(runs: Sequence[PlannedRun], asked: int | None) -> int:
    """How many runs at a time: what was asked for, or one for each core."""
    threads = max((run.config.threads for run in runs), default=1)
    return max(1, min(len(runs), asked or available_cores() // threads))


def run_all(runs: Sequence[PlannedRun], jobs: int, on_round: OnRound, on_state: OnState) -> bool:
    """Do these runs; False if someone asked to stop. A run that fails does not stop the others.

    Raises when all others are done, naming those that failed.
    """
    waiting, failed = list(runs), list[tuple[PlannedRun, dict[str, Any]]]()
    with stop_requests() as request, _workers(jobs) as workers:
        handed_on = False
        while busy := _occupy(workers, waiting, request, on_state):
            time.sleep(LOOK_SECONDS)
            if request.number and not handed_on:
                handed_on = True
                for worker in busy:
                    os.kill(worker.process.pid, signal.SIGINT)
            for worker in busy:
                run, answer = worker.run, worker.answer()
                for record in worker.new_records():
                    on_round(run, record)
                if answer is None:
                    continue
                worker.tail = None
                on_state(run, answer["state"])
                if answer["state"] == "failed":
                    failed.append((run, answer))
        stopped = request.number != 0
    if failed:
        raise _failure(failed, len(runs))
    return not stopped


@dataclass
class _Tail:
    """Reads the records of a run as they come, without what stands in other files: their coverage and seconds."""

    run: PlannedRun
    place: int = 0

    def new(self) -> list[RoundRecord]:
        file = self.run.folder.path / METRICS
        try:
            with file.open("rb") as opened:
                opened.seek(self.place)
                text = opened.read()
        except OSError:  # not there yet
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.place += len(whole)
        return [RoundRecord.from_row(json.loads(line)) for line in whole.splitlines()]


class _Worker:
    """A process and the run that it is doing."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which hands it on once.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedtailor.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**FOR_TRAINING, **os.environ},
            start_new_session=True,
        )
        assert self.process.stdout is not None, "asked for"
        os.set_blocking(self.process.stdout.fileno(), False)
        self.tail: _Tail | None = None
        self._heard = b""

    @property
    def run(self) -> PlannedRun:
        assert self.tail is not None, "an idle worker has no run"
        return self.tail.run

    def start(self, run: PlannedRun) -> None:
        self.tail = _Tail(run)
        self.tail.new()  # rounds of an earlier start were shown then
        config = run.config
        if config.engine.workers == "auto":  # the cores are taken by other runs
            config = replace(config, engine=replace(config.engine, workers=0))
        command = {"config": to_toml(config), "folder": str(run.folder.path)}
        assert self.process.stdin is not None, "asked for"
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def new_records(self) -> list[RoundRecord]:
        return self.tail.new() if self.tail is not None else []

    def answer(self) -> dict[str, Any] | None:
        """What became of the run, once it is known."""
        assert self.process.stdout is not None, "asked for"
        code = self.process.poll()
        self._heard += self.process.stdout.read() or b""
        line, end, self._heard = self._heard.partition(b"\n")
        if end:
            return dict(json.loads(line))
        self._heard = line
        if code is None:
            return None
        return {"state": "failed", "text": f"its process ended with code {code}", "exit_code": 70}


def _occupy(
    workers: list[_Worker], waiting: list[PlannedRun], request: Request, on_state: OnState
) -> list[_Worker]:
    """Give idle workers something to do; those that are busy. A worker that died is replaced."""
    for place, worker in enumerate(workers):
        if waiting and worker.tail is None and not request.number:
            if worker.process.poll() is not None:
                workers[place] = worker = _Worker()
            run = waiting.pop(0)
            worker.start(run)
            on_state(run, "started")
    return [worker for worker in workers if worker.tail is not None]


@contextmanager
def _workers(count: int) -> Iterator[list[_Worker]]:
    workers = [_Worker() for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:  # end of input ends them
            assert worker.process.stdin is not None, "asked for"
            with suppress(BrokenPipeError):
                worker.process.stdin.close()
            worker.process.wait()


def _failure(failed: Sequence[tuple[PlannedRun, dict[str, Any]]], count: int) -> FedtailorError:
    lines = [f"{len(failed)} of {count} runs failed, the others are saved:"]
    lines += [f"  {run.title}: {answer['text']}" for run, answer in failed]
    code = failed[0][1]["exit_code"]
    kind = next((kind for kind in KINDS if kind.exit_code == code), FedtailorError)
    return kind("\n".join([*lines, "The same command does what is missing."]))
