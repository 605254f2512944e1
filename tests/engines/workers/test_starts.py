"""Time in which workers start is no client's, and workers that are killed while they start are replaced for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from fedtailor.engines.in_process import InProcess
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.engines.workers.starts import PATIENCE_SECONDS, Starts
from fedtailor.messages import Task, Update
from fedtailor.methods.registry import get_method
from fedtailor.server.faults import Timely
from helpers import differing, mlp_model, run, setup_of, vector_data


class Clock:
    """Time that passes only when somebody says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Warming:
    """An engine whose workers take so many seconds to start, and whose clients take one second each."""

    inner: InProcess
    clock: Clock
    seconds: float
    starting: bool = True

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        until = self.clock.now + self.seconds
        while self.clock.now < until:
            self.clock.now += 0.1
            yield None
        self.starting = False
        for answer in self.inner.run(tasks):
            self.clock.now += 1
            yield answer


@pytest.mark.parametrize(("deadline", "merged"), [(6.5, 6), (3.5, 3)])
def test_a_deadline_begins_when_somebody_can_work(deadline, merged):
    method, data, clock = get_method("fedavg")(), vector_data(), Clock()
    result = run(
        method, mlp_model(), data, engine=lambda inner: Timely(Warming(inner, clock, 100.0), deadline, clock)
    )
    assert result.records[0].cohort.merged == merged
    assert result.records[0].cohort.refused == ({} if merged == 6 else {"late": 3})


def test_workers_that_die_too_soon_are_replaced_with_pauses_until_patience_ends():
    clock = Clock()
    starts = Starts(clock)
    begun, pauses = clock.now, list[float]()

    def fail_again_and_again():
        while len(pauses) < 1000:
            starts.failed("signal 9")
            assert not starts.may()
            before = clock.now
            while not starts.may():
                clock.now += 0.1
            pauses.append(clock.now - before)

    with pytest.raises(NotPortable, match="worker processes in a row ended .* seconds: signal 9"):
        fail_again_and_again()
    assert PATIENCE_SECONDS <= clock.now - begun < PATIENCE_SECONDS + 15
    assert 15 < len(pauses) < 30
    starts.worked()
    assert starts.may()
    starts.failed("signal 9")  # a new row begins


@pytest.mark.slow
def test_five_workers_killed_while_they_start_and_a_short_deadline_do_not_end_a_run():
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    tasks = [
        method.assign(setup.start.state, client, model, setup.seeds)
        for setup in [setup_of(method, model, data)]
        for client in setup.clients(0)
    ]
    killed: set[int] = set()
    with WorkerPool(method, model, data, 2) as pool:
        found: list[Update] = []
        for answer in Timely(pool, 20.0).run(tasks):
            if answer is None:
                continue
            assert isinstance(answer, Update), answer
            found.append(answer)
        pool.close()
    with WorkerPool(method, model, data, 2) as pool:
        again: list[Update] = []
        for answer in pool.run(tasks):
            for pid in pool.pids:
                if len(killed) < 5 and pid not in killed and pool.starting:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            if isinstance(answer, Update):
                again.append(answer)
    assert len(killed) == 5
    assert len(found) == len(again) == len(tasks)
    by_client = {update.client: update for update in found}
    for update in again:
        assert differing(update.patch.values, by_client[update.client].patch.values) == set()
