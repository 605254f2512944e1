"""Evaluation by workers that no task waits for: the same scores, whatever happens to the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fedtailor.client.evaluate import evaluate_patches
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.engines import automatic
from fedtailor.engines.automatic import Automatic
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.engines.workers.process import WorkerProcess
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, image_data, images
from odd_methods import Odd

SIZES = (6, 5, 7, 4)
MODEL, DATA = cnn_model(), replace(image_data(SIZES), test=images(1100))  # five batches: five jobs
DEPLOYED = [(MODEL.cut(MODEL.weights(), Cut.everything()),)]
SCORES = [evaluate_patches(MODEL, DEPLOYED[0], DATA.test)]


@pytest.fixture(scope="module")
def method(tmp_path_factory) -> Odd:
    return Odd(folder=str(tmp_path_factory.mktemp("odd")))


@pytest.fixture(scope="module")
def shared(method) -> Iterator[WorkerPool]:
    with WorkerPool(method, MODEL, DATA, 2) as pool:
        yield pool


@pytest.fixture
def pool(shared, method) -> WorkerPool:
    method.tell("none")
    return shared


@pytest.fixture
def given(monkeypatch) -> list[int | None]:
    """The client of every job that a worker is given; None for one of an evaluation."""
    order: list[int | None] = []
    give = WorkerProcess.give

    def note(self, job):
        order.append(job.tasks[0].client.id if job.tasks else None)
        give(self, job)

    monkeypatch.setattr(WorkerProcess, "give", note)
    return order


def train(method: Odd, engine) -> set[int]:
    state = method.init(MODEL)
    tasks = [method.assign(state, client(n, 1, size), MODEL, Seeds(0)) for n, size in enumerate(SIZES)]
    return {answer.client for answer in engine.run(tasks) if answer is not None}


def test_the_scores_are_those_of_an_evaluation_for_itself(pool):
    assert pool.measure(DEPLOYED) == SCORES
    assert pool.measure_aside(DEPLOYED)() == SCORES


def test_tasks_go_before_what_is_aside_and_nobody_waits_for_it(pool, method, given):
    pool.start()
    while not all(worker.ready for worker in pool._workers):
        assert pool.ready in (True, False)  # asking listens to them
        time.sleep(0.01)
    later = pool.measure_aside(DEPLOYED)
    assert given == [None, None]  # both workers were free
    assert train(method, pool) == set(range(len(SIZES)))
    first = given.index(2)  # the longest task
    assert given[:first] == [None, None]
    assert None not in given[first : first + len(SIZES)]  # no job of the evaluation comes between tasks
    assert later() == SCORES
    assert given.count(None) == 5
    assert later() == SCORES  # asked again, nothing is done again
    assert given.count(None) == 5


def test_one_evaluation_at_a_time(pool):
    twice = [(MODEL.cut({name: 2 * value for name, value in MODEL.weights().items()}, Cut.everything()),)]
    first, second = pool.measure_aside(DEPLOYED), pool.measure_aside(twice)
    assert second() == [evaluate_patches(MODEL, twice[0], DATA.test)]
    assert first() == SCORES


def test_what_arrives_while_nobody_works_is_kept(pool):
    """``ready`` listens to the workers too."""
    later = pool.measure_aside(DEPLOYED)
    while any(worker.job is not None for worker in pool._workers):
        assert pool.ready
    assert later() == SCORES


@pytest.mark.slow
def test_workers_that_die_at_it_are_replaced(pool, method):
    train(method, pool)
    later = pool.measure_aside(DEPLOYED)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert train(method, pool) == set(range(len(SIZES)))
    assert later() == SCORES


def test_a_late_client_does_not_cost_the_evaluation(pool, method):
    """Whoever gives up on a round ends the workers that are still at its tasks, and no others."""
    train(method, pool)
    later = pool.measure_aside(DEPLOYED)
    answers = pool.run([method.assign(method.init(MODEL), client(0, 1, 6), MODEL, Seeds(0))])
    next(answers)
    answers.close()
    assert later() == SCORES


@pytest.mark.slow
def test_a_pool_that_was_closed_still_tells(method):
    with WorkerPool(method.tell("none"), MODEL, DATA, 1) as pool:
        later = pool.measure_aside(DEPLOYED)
    assert later() == SCORES


@pytest.mark.slow
def test_without_workers_it_is_done_at_once_and_with_dying_ones_here(method, monkeypatch):
    notices: list[str] = []
    with Automatic(method.tell("none"), MODEL, DATA, 1, notices.append) as engine:
        assert engine.measure_aside(DEPLOYED)() == SCORES
        monkeypatch.setattr(automatic, "HEAD_START_SECONDS", 0.0)
        while not engine._pool_is_ready():
            pass
        later = engine.measure_aside(DEPLOYED)
        monkeypatch.setattr(engine._pool, "_finish", refuse)
        assert later() == SCORES
    assert [notice.split(":")[0] for notice in notices] == ["all clients run in one process, on one core"]


def refuse(_measurement) -> None:
    raise NotPortable("workers do not come up")
