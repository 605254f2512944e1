"""Tiny tasks that are handed to a worker together: as few jobs as pay, and no client suffers from another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest

from fedtailor.engines.in_process import InProcess
from fedtailor.engines.workers import piles
from fedtailor.engines.workers import process as worker_process
from fedtailor.engines.workers.jobs import Job
from fedtailor.engines.workers.piles import TINY_EFFORT, TRIES, Lost, Pile, bundled
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.engines.workers.process import WorkerProcess
from fedtailor.messages import Refused, Task, Update
from helpers import bits, cnn_model, image_data, task_for
from odd_methods import Odd

COUNT = 24
SIZES = [3] * 8  # of as many tiny tasks for two workers
MODEL, DATA = cnn_model(), image_data((4,) * COUNT)


def tasks() -> list[Task]:
    """As many clients, and one patch for all."""
    first = task_for(MODEL)
    return [replace(first, client=replace(first.client, id=n, num_examples=4)) for n in range(COUNT)]


def clients(jobs) -> list[list[int]]:
    return [[task.client.id for task in job.tasks] for job in jobs]


def test_tiny_tasks_of_one_patch_go_together():
    some = tasks()
    tiny = [(task, 1000) for task in some]
    assert [len(each) for each in clients(bundled(tiny, least=8))] == SIZES
    assert [len(each) for each in clients(bundled(tiny[:10], least=4))] == [
        3,
        2,
        3,
        2,
    ]  # two workers: five each
    assert [len(each) for each in clients(bundled(tiny, least=0))] == [1] * COUNT
    assert [*chain(*clients(bundled(tiny, least=8)))] == list(range(COUNT))
    assert len({id(job.tensors) for job in bundled(tiny, least=8)}) == 1
    long = [(task, TINY_EFFORT) for task in some]
    assert [len(each) for each in clients(bundled(long, least=2))] == [1] * COUNT
    other = [(replace(task, patch=replace(task.patch)), effort) for task, effort in tiny[:2]]
    assert [len(each) for each in clients(bundled(other, least=1))] == [1, 1]  # tensors of their own


def test_answers_that_would_fill_the_mailbox_do_not_go_together(monkeypatch):
    size = sum(value.nbytes for value in tasks()[0].patch.values.values())
    monkeypatch.setattr(piles, "BUNDLE_BYTES", 2 * size)
    assert [len(each) for each in clients(bundled([(task, 1) for task in tasks()[:5]], least=1))] == [2, 2, 1]


def test_of_a_bundle_that_is_lost_every_task_has_one_try_left():
    jobs = bundled([(task, 1000) for task in tasks()[:3]], least=1)
    pile = Pile(jobs)
    pile.given()
    assert pile.settle(jobs[0], Lost("signal 9")) is False
    assert sorted(clients(pile.open)) == [[0], [1], [2]]
    assert len(pile) == 3
    for left in (2, 1, 0):
        job = pile.next
        pile.given()
        assert pile.settle(job, Lost("signal 9")) is True  # the second time, as for a task that was alone
        assert len(pile) == left
    assert TRIES == 2


@pytest.fixture(scope="module")
def method(tmp_path_factory) -> Odd:
    return Odd(folder=str(tmp_path_factory.mktemp("odd")))


@pytest.fixture(scope="module")
def pool(method) -> Iterator[WorkerPool]:
    with WorkerPool(method, MODEL, DATA, 2) as pool:
        yield pool


def given_in(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], dict[int, Update | Refused]]:
    """How many tasks went out together each time, and what came back.

    A job that waited for a worker which never began with it goes out again, and counts once.
    """
    given: list[Job] = []
    give = WorkerProcess.give

    def note(self, job):
        if not any(job is each for each in given):
            given.append(job)
        give(self, job)

    with monkeypatch.context() as patched:
        patched.setattr(WorkerProcess, "give", note)
        answers = {answer.client: answer for answer in pool.run(tasks()) if answer is not None}
    assert sorted(answers) == list(range(COUNT))
    return [len(job.tasks) for job in given], answers


def check(answers: dict[int, Update | Refused], method: Odd, without: set[int]) -> None:
    """All but some are to the bit what this process makes of them."""
    method.tell("none")
    expected = {answer.client: answer for answer in InProcess(method, MODEL, DATA).run(tasks())}
    for client in set(answers) - without:
        ours, theirs = expected[client], answers[client]
        assert isinstance(theirs, Update)
        assert {name: bits(value) for name, value in ours.patch.values.items()} == {
            name: bits(value) for name, value in theirs.patch.values.items()
        }
        assert ours.metrics == theirs.metrics


def test_bundles_have_the_bits_of_one_process(pool, method, monkeypatch):
    method.tell("none")
    sizes, answers = given_in(pool, monkeypatch)
    assert sizes == SIZES
    check(answers, method, set())


@pytest.mark.slow
def test_a_client_that_kills_its_workers_takes_nobody_with_it(pool, method, monkeypatch):
    method.tell("kill", again=True)
    sizes, answers = given_in(pool, monkeypatch)
    assert method.times == 2
    assert sorted(sizes) == sorted(SIZES + [1] * 3)  # those of its bundle, each by itself
    assert isinstance(answers[2], Refused)
    assert answers[2].reason == "worker-died"
    check(answers, method, {2})


@pytest.mark.slow
def test_a_client_that_dawdles_holds_up_nobody_else(pool, method, monkeypatch):
    monkeypatch.setattr(worker_process, "BUNDLE_SECONDS", 1.0)
    method.tell("sleep")  # once: then it is as fast as all others
    sizes, answers = given_in(pool, monkeypatch)
    check(answers, method, set())
    assert sorted(sizes) == sorted(SIZES + [1] * 3)
    method.tell("none")
    assert given_in(pool, monkeypatch)[0] == [1] * COUNT  # in this run they were not tiny
