"""kill -9 of every part of a run on Flower, at random moments: resumed, it ends with the bits of the run in process.

A round counts only if all its clients answered (``quorum = 1``): a client whose node was killed would otherwise be left
out, as it should be, and the model would be another one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.flower.local import LocalLink, local_link
from flower.link.real import Command, parts, rounds_in, run_here, server_processes, wait_until
from flower.link.warm import warm_processes
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights

pytestmark = pytest.mark.slow
NODES, ROUNDS, KILLS = 2, 6, 5
TEXT = CONFIG.replace("{method}", "flado").replace("rounds = 3", f"rounds = {ROUNDS}")
TEXT = TEXT.replace("clients_per_round = 3", "clients_per_round = 4").replace("clients = 5", "clients = 4")
TEXT = TEXT.replace("workers = 0", "workers = 0\nquorum = 1.0\nretries = 0\ndeadline = 240\nwait = 240")
Kill = Callable[[LocalLink, Path], None]
LET_IN = "SuperNode ID:"  # what a SuperNode says when it is connected
PATIENCE = 400.0  # seconds for a round, or for the end of a command


@pytest.fixture
def link(tmp_path: Path) -> Iterator[LocalLink]:
    folder = tmp_path / "link"
    with warm_processes(folder / "warm"), local_link(folder, parts(folder, NODES)) as running:
        yield running


def start_again(link: LocalLink, number: int) -> None:
    """Start a killed SuperNode until it is let in: for a minute the SuperLink takes the old one for connected."""
    log, name = link.folder / f"node{number}.log", f"node{number}"
    before, end = log.read_text(encoding="utf-8").count(LET_IN), time.monotonic() + 240
    while log.read_text(encoding="utf-8").count(LET_IN) == before:
        assert time.monotonic() < end, f"{name} was not let in within 240 s"
        if name in link.processes and link.processes[name].poll() is not None:
            link.stop(name)
        if name not in link.processes:
            link.add_node(number, parts(link.folder, NODES)[number])
        time.sleep(0.2)


def kill_server(link: LocalLink, folder: Path) -> None:
    found = server_processes(folder)
    assert found, "nobody holds the run's lock"
    for process in found:
        os.kill(process, signal.SIGKILL)


def kill_link(link: LocalLink, _folder: Path) -> None:
    link.stop("superlink", signal.SIGKILL)
    link.start_link()


def kill_node(link: LocalLink, _folder: Path) -> None:
    link.stop("node1", signal.SIGKILL)
    start_again(link, 1)


class Killed:
    """A run of the command line that is killed again and again; ``resumed`` counts how often it had to be resumed."""

    def __init__(self, link: LocalLink, folder: Path, kill: Kill) -> None:
        self.link, self.folder, self.kill, self.resumed = link, folder, kill, 0
        self.moment = random.Random(kill.__name__)
        self.command = self._begin("run", str(folder.parent / "run.toml"), "--runs", str(folder.parent))

    def _begin(self, *words: str) -> Command:
        return Command(self.folder.parent / f"command{self.resumed}.log", self.link, *words)

    def after(self, rounds: int) -> None:
        """Kill at a random moment of the round after so many, and go on."""
        wait_until(lambda: rounds_in(self.folder) >= rounds or self._ended(), PATIENCE, f"round {rounds}")
        assert rounds_in(self.folder) >= rounds, self.command.said
        time.sleep(self.moment.uniform(0, 0.8) * seconds_of_a_round(self.folder))
        saved = rounds_in(self.folder)
        self.kill(self.link, self.folder)
        if self.kill is kill_node:
            wait_until(lambda: self._ended() or rounds_in(self.folder) > saved, PATIENCE, "the next round")
            if not self._ended():
                return  # the node had nothing to do when it was killed, so that nothing was lost
        if self.kill is kill_server and rounds > 1:
            self.command.stop()  # after a minute the SuperLink notices that the server is gone; once is enough
        else:
            assert self.command.end(PATIENCE) != 0, self.command.said
        wait_until(lambda: not server_processes(self.folder), 60, "the end of the server")
        self.resumed += 1
        saved = rounds_in(self.folder)
        self.command = self._begin("resume", str(self.folder))
        wait_until(lambda: bool(self.command.rounds) or self._ended(), PATIENCE, "a round after the kill")
        assert self.command.rounds[:1] in ([saved], [saved + 1]), self.command.said  # at most one is repeated

    def _ended(self) -> bool:
        return self.command.process.poll() is not None


@pytest.mark.parametrize(
    "kill", [kill_server, kill_link, kill_node], ids=["server", "superlink", "supernode"]
)
def test_a_run_survives_kill_9_of(kill: Kill, link: LocalLink, tmp_path: Path) -> None:
    folder = tmp_path / "same"
    (tmp_path / "run.toml").write_text(TEXT, encoding="utf-8")
    run_here(TEXT, tmp_path / "here")
    run = Killed(link, folder, kill)
    try:
        for rounds in range(1, KILLS + 1):
            run.after(rounds)
        assert run.command.end(PATIENCE) == 0, run.command.said
    finally:
        run.command.stop()
    rows = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, ROUNDS + 1))
    assert run.resumed == KILLS or kill is kill_node
    print(f"killed {KILLS} times, resumed {run.resumed} times")
    assert not differing(final_weights(tmp_path / "here"), final_weights(folder))


def seconds_of_a_round(folder: Path) -> float:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return min(float(event["seconds"]) for event in events if event.get("event") == "round")
