"""A job that waits in a worker's second mailbox: it has not begun, nobody idles beside it, and no answer suffers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedtailor.client.evaluate import evaluate_patches
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.workers import piles
from fedtailor.engines.workers import process as worker_process
from fedtailor.engines.workers.jobs import Job, answers_of, job_of
from fedtailor.engines.workers.piles import TRIES, Lost, Pile
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.engines.workers.process import WorkerProcess
from fedtailor.messages import Task, Update
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, differing, image_data, task_for
from odd_methods import Odd

SIZES = (6, 6, 20, 6, 30, 6, 30, 6, 30, 6, 30, 6)  # client 2 has most to do, then those of half the width
MODEL, DATA = cnn_model(), image_data(SIZES)
EVERYBODY = list(range(len(SIZES)))
DEPLOYED = [(MODEL.cut(MODEL.weights(), Cut.everything()),)]


@pytest.fixture(scope="module")
def method(tmp_path_factory) -> Odd:
    return Odd(folder=str(tmp_path_factory.mktemp("odd")))


@pytest.fixture(scope="module")
def shared(method) -> Iterator[WorkerPool]:
    with WorkerPool(method, MODEL, DATA, 2) as pool:
        yield pool


@pytest.fixture
def pool(shared, method, monkeypatch) -> WorkerPool:
    """One whose workers are ready: who is given what does not depend on who is up first."""
    method.tell("none")
    monkeypatch.setattr(shared, "_bundles", False)
    while not (len(shared.pids) == 2 and all(worker.ready for worker in shared._workers)):
        shared.start()
        assert shared.ready in (True, False)  # asking listens to them
        time.sleep(0.01)
    for worker in shared._workers:
        while worker.busy:  # with a job that was withdrawn too late, to whose answer nobody has listened yet
            assert worker.receive() is None
            time.sleep(0.001)
    return shared


@dataclass(frozen=True)
class Handed:
    """What a worker was given, and what it was at."""

    pid: int
    client: int
    behind: int | None


@pytest.fixture
def handed(monkeypatch) -> list[Handed]:
    """Every job that is given out, in order."""
    order: list[Handed] = []
    give = WorkerProcess.give

    def note(self, job):
        at = self.job.tasks[0].client.id if self.job else None
        give(self, job)
        order.append(Handed(self.pid, job.tasks[0].client.id, at))

    monkeypatch.setattr(WorkerProcess, "give", note)
    return order


def tasks_for(method) -> list[Task]:
    """Some train half of the width: what waits may be larger than what is being done."""
    state = method.init(MODEL)
    return [
        method.assign(state, client(number, "1/2" if size == 30 else 1, size), MODEL, Seeds(0))
        for number, size in enumerate(SIZES)
    ]


def check(answers: list[Any], method: Odd) -> None:
    """Each client has answered once, to the bit what this process makes of its task."""
    method.tell("none")
    expected = {answer.client: answer for answer in InProcess(method, MODEL, DATA).run(tasks_for(method))}
    assert sorted(answer.client for answer in answers) == EVERYBODY
    for answer in answers:
        assert isinstance(answer, Update), answer
        assert differing(answer.patch.values, expected[answer.client].patch.values) == set()
        assert answer.metrics == expected[answer.client].metrics


def run(pool: WorkerPool, method: Odd) -> list[Any]:
    """All answers; a job that gets lost would be waited for without end."""
    ends, answers = time.monotonic() + 60, []
    for answer in pool.run(tasks_for(method)):
        assert time.monotonic() < ends
        answers += [] if answer is None else [answer]
    return answers


def jobs(*efforts: int) -> list[Job]:
    return [Job([dict(task_for(MODEL).patch.values)], {}, effort) for effort in efforts]


def pile_after_one(*efforts: int) -> tuple[Pile, Job]:
    """A pile of which the longest job was given out."""
    pile = Pile(jobs(*efforts))
    first = pile.next
    pile.given()
    return pile, first


@pytest.mark.parametrize(
    ("efforts", "may"),
    [
        ((5, 5, 5, 5), True),  # two are left for two workers
        ((5, 5, 5), False),
        ((5, 5), False),
        ((9, 3, 3, 3, 3, 3, 3, 3), True),
        ((9, 3, 3, 3, 3, 3, 3), False),  # the others would be through before the first is
        ((5,), False),
        ((0, 0, 0, 0), True),
        ((0, 0, 0), False),
    ],
)
def test_only_while_the_others_have_enough_to_do(efforts, may):
    pile, first = pile_after_one(*efforts)
    assert pile.may_wait(first, workers=2) is may
    assert pile.may_wait(None, workers=2) is False


def test_not_behind_a_job_of_another_pile_nor_if_it_is_large(monkeypatch):
    pile, first = pile_after_one(5, 5, 5, 5, 5)
    assert pile.may_wait(*jobs(1), workers=2) is False
    assert pile.may_wait(first, workers=2)
    monkeypatch.setattr(piles, "AHEAD_BYTES", pile.next.nbytes - 1)
    assert not pile.may_wait(first, workers=2)


def test_what_waited_is_the_first_again_and_has_all_its_tries():
    pile, first = pile_after_one(3, 2, 1)
    second = pile.next
    pile.given()
    assert pile.settle(first, Lost("signal 9", second)) is False
    assert pile.next is first
    pile.given()
    assert pile.next is second
    pile.given()
    assert pile.settle(first, Lost("signal 9", second)) is True  # for good: it had begun twice
    assert pile.next is second
    for _ in range(TRIES - 1):
        pile.given()
        assert pile.settle(second, Lost("signal 9")) is False
    pile.given()
    assert pile.settle(second, Lost("signal 9")) is True


def test_one_ahead_at_most_and_none_among_the_last(pool, method, handed):
    check(run(pool, method), method)
    assert [each.client for each in handed[:2]] == [2, 4]
    assert all(each.behind is None for each in handed[:2])
    assert [each.behind for each in handed[2:4]] == [
        2,
        4,
    ]  # neither can have answered yet: nobody has listened
    left = [len(SIZES) - place for place, each in enumerate(handed) if each.behind is not None]
    assert min(left) > 2


def test_nobody_trains_behind_an_evaluation_that_is_done_aside(pool, method, monkeypatch):
    behind: list[bool] = []
    give = WorkerProcess.give

    def note(self, job):
        behind.append(self.job is not None and bool(self.job.tasks) != bool(job.tasks))
        give(self, job)

    monkeypatch.setattr(WorkerProcess, "give", note)
    later = pool.measure_aside(DEPLOYED)
    check(run(pool, method), method)
    assert later() == [evaluate_patches(MODEL, DEPLOYED[0], DATA.test)]
    assert len(behind) > len(SIZES)
    assert not any(behind)


def test_what_waited_for_a_worker_that_died_is_done_by_another_and_has_its_tries_left(
    pool, method, handed, monkeypatch
):
    monkeypatch.setattr(pool, "_take_back", lambda _pile: False)  # so that it waits there until the end
    give, told = WorkerProcess.give, []

    def note(self, job):
        (task,) = job.tasks
        if not told and any(each.client == task.client.id and each.behind == 2 for each in handed):
            told.append(method.tell("kill", client=task.client.id))  # now it kills a worker itself, once
        give(self, job)

    monkeypatch.setattr(WorkerProcess, "give", note)
    method.tell("late_kill")
    answers = run(pool, method)
    waited = next(each for each in handed if each.behind == 2)
    assert method.times == 1
    check(answers, method)
    places = [each for each in handed if each.client == waited.client]
    assert len(places) == 3
    assert len({each.pid for each in places}) == 3
    assert sum(each.client == 2 for each in handed) == 2


@pytest.mark.parametrize("in_time", [True, False])
def test_nobody_idles_beside_a_job_that_waits(pool, method, handed, monkeypatch, in_time):
    """Also when the worker begins with it before it hears that another has it."""
    said: list[Any] = []
    decode = worker_process.decode

    def note(view):
        said.append(decode(view))
        return said[-1]

    monkeypatch.setattr(worker_process, "decode", note)
    if not in_time:
        monkeypatch.setattr(worker_process, "WITHDRAWN", slice(16, 24))
    method.tell("nap")
    answers = run(pool, method)
    assert answers[-1].client == 2  # all others were done while it slept
    waited = next(each for each in handed if each.behind == 2)
    assert len({each.pid for each in handed if each.client == waited.client}) == 2
    check(answers, method)
    check(run(pool, method), method)
    assert any(value is not None and value[1] is None for value in said) is in_time


def test_who_gives_up_on_a_round_ends_the_workers_for_which_its_jobs_wait(pool, method):
    method.tell("sleep")
    answers = pool.run(tasks_for(method))
    assert next(answers) is None  # everybody is at work
    assert next(answers) is not None
    busy = [worker.pid for worker in pool._workers if worker.job is not None]
    (slow,) = [worker for worker in pool._workers if worker.job and worker.job.tasks[0].client.id == 2]
    assert slow.waiting is not None
    answers.close()
    assert slow.pid in busy
    assert not set(busy) & set(pool.pids)
    check(run(pool, method.tell("none")), method)


def heard(worker: WorkerProcess) -> Any:
    """The next answer of a worker."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if (value := worker.receive()) is not None:
            return value
        time.sleep(0.001)
    raise AssertionError("no answer")


def alone(tasks: list[Task]) -> list[Job]:
    return [job_of([(task, 1)], [dict(task.patch.values)]) for task in tasks]


@pytest.mark.parametrize("longest_first", [True, False])
def test_an_answer_that_nobody_has_read_stays_whole_while_the_next_is_written(pool, method, longest_first):
    tasks = sorted(tasks_for(method), key=lambda task: task.nbytes, reverse=longest_first)
    worker = pool._workers[0]
    given, answers, sizes = alone(tasks), [], []
    for first, second in zip(given[::2], given[1::2], strict=True):
        worker.give(first)
        worker.give(second)
        time.sleep(0.05)  # both are done, or nearly
        for job in (first, second):
            assert worker.job is job
            answers += answers_of(heard(worker), job.tasks)
        sizes.append([os.fstat(memory.descriptor).st_size for memory in worker._memories])
    check(answers, method)
    assert max(map(sum, sizes)) < 8 * max(task.nbytes for task in tasks) + 2**16


def test_to_a_job_that_was_withdrawn_there_is_no_answer(pool, method):
    worker = pool._workers[0]
    first, second, third, *_ = alone(tasks_for(method))
    worker.give(first)
    worker.give(second)
    assert worker.withdraw() is second
    assert worker.waiting is None
    pile = Pile([first, *jobs(1, 1, 1, 1, 1)])
    pool._give_ahead(pile)  # there is no room
    assert len(pile) == 6
    assert answers_of(heard(worker), first.tasks)
    while worker.busy:
        assert worker.job is None
        assert worker.receive() is None
    worker.give(third)
    assert [answer.client for answer in answers_of(heard(worker), third.tasks)] == [2]


def test_the_mailboxes_of_many_jobs_are_no_longer_than_those_of_a_few(pool, method):
    worker, seen = pool._workers[0], []
    for _ in range(3):
        for job in alone(tasks_for(method)):
            worker.give(job)
            worker.give(job)
            assert heard(worker)
            assert heard(worker)
        seen.append([os.fstat(memory.descriptor).st_size for memory in worker._memories])
    assert seen[0] == seen[2]


def test_what_is_too_large_to_wait_lies_in_the_first_mailbox(pool, method):
    worker = pool._workers[0]
    small, *_ = alone(tasks_for(method))
    large = replace(small, tensors=[{name: value.clone() for name, value in small.tensors[0].items()}])
    worker.give(small)
    worker.give(small)
    heard(worker)
    heard(worker)
    worker.give(large)
    heard(worker)
    assert [box.tensors is large.tensors for box in worker._mailboxes] == [True, False]


def test_a_bundle_that_waited_begins_when_the_one_before_is_answered(pool, method, monkeypatch):
    now = [1000.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    tasks = tasks_for(method)
    bundle = job_of([(task, 1) for task in tasks if task.client.num_examples == 6], alone(tasks)[0].tensors)
    worker = pool._workers[0]
    with monkeypatch.context() as patched:
        patched.setattr(worker_process, "time", Clock)
        worker.give(bundle)
        worker.give(bundle)
        now[0] += worker_process.BUNDLE_SECONDS + 1
        assert worker.dawdles
        for _ in range(10**5):
            if worker.receive() is not None:
                break
            time.sleep(0.001)
        assert worker.job is bundle
        assert not worker.dawdles
        now[0] += worker_process.BUNDLE_SECONDS + 1
        assert worker.dawdles
    heard(worker)
    worker.check_life()
