"""The worker pool: the same bits, whatever happens to its processes, and nothing left of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.client.evaluate import batch_scores, evaluate_patches
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.values import evaluation_of
from fedtailor.engines.workers import process as worker_process
from fedtailor.engines.workers.piles import Lost
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.engines.workers.process import WorkerProcess
from fedtailor.engines.workers.worker import MAILBOXES, report_failure
from fedtailor.errors import FedtailorError
from fedtailor.messages import Lease, Refused, Update
from fedtailor.seeds import Seeds
from fedtailor.server.faults import Timely, nobody_got_through
from fedtailor.storage.wire import DecodeError
from helpers import Result, bits, cnn_model, differing, image_data, run, slow_if, timeless
from odd_methods import Odd

SIZES = (6, 5, 7, 4)
MODEL, DATA = cnn_model(), image_data(SIZES)
SETTINGS: dict[str, Any] = {"fleet": "uniform-2", "rounds": 1, "every": 1}


def here(method: Odd, **settings) -> Result:
    """Rounds in this process, in which nothing odd happens."""
    return run(method.tell("none"), MODEL, DATA, **{**SETTINGS, **settings})


def there(method: Odd, pool: WorkerPool, **settings) -> Result:
    """The same rounds in workers."""
    return run(method, MODEL, DATA, engine=lambda _: pool, **{**SETTINGS, **settings})


def assert_same(one: Result, other: Result) -> None:
    assert differing(one.state.weights, other.state.weights) == set()
    assert timeless(one.records) == timeless(other.records)


def tasks_for(method, model=MODEL, clients=SIZES):
    from helpers import client

    state = method.init(model)
    return [
        method.assign(state, client(number, "1/2" if number % 2 else 1, size), model, Seeds(0))
        for number, size in enumerate(clients)
    ]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def belongings() -> tuple[int, int, set[int]]:
    """Descriptors, threads and children of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), children()


@pytest.fixture(scope="module")
def method(tmp_path_factory) -> Odd:
    return Odd(folder=str(tmp_path_factory.mktemp("odd")))


@pytest.fixture(scope="module")
def expected(method) -> Result:
    """One round without workers."""
    return here(method)


@pytest.fixture(scope="module")
def shared(method) -> Iterator[WorkerPool]:
    with WorkerPool(method, MODEL, DATA, 2) as pool:
        yield pool


@pytest.fixture
def pool(shared, method) -> WorkerPool:
    """One pool for all tests: starting a process takes seconds."""
    method.tell("none")
    return shared


def test_answers_are_those_of_one_process_down_to_the_memories(pool, method):
    tasks = tasks_for(method)
    ours = {answer.client: answer for answer in InProcess(method, MODEL, DATA).run(tasks)}
    theirs = {answer.client: answer for answer in pool.run(tasks) if answer is not None}
    assert ours.keys() == theirs.keys() == set(range(len(SIZES)))
    for client, mine in ours.items():
        other = theirs[client]
        assert isinstance(mine, Update)
        assert isinstance(other, Update)
        assert (mine.weight, mine.metrics, mine.patch.cut) == (other.weight, other.metrics, other.patch.cut)
        assert list(mine.patch.values) == list(other.patch.values)
        assert mine.patch.cut.tag == other.patch.cut.tag
        assert differing(mine.patch.values, other.patch.values) == set()
        assert bits(mine.memory["noise"]) == bits(other.memory["noise"])
        assert (other.memory["times"], other.memory["since"]) == (1, -1)


def test_rounds_with_memories_are_the_same(pool, method):
    assert_same(here(method, rounds=3), there(method, pool, rounds=3))


def test_longest_tasks_are_given_out_first(pool, method, monkeypatch):
    order: list[int] = []
    give = WorkerProcess.give

    def note(self, job):
        order.append(job.tasks[0].client.id)
        give(self, job)

    monkeypatch.setattr(WorkerProcess, "give", note)
    tasks = tasks_for(method)  # sizes 6, 5, 7, 4; clients 1 and 3 have half the width
    assert len([answer for answer in pool.run(tasks) if answer is not None]) == 4
    assert order == [2, 0, 1, 3]


def test_a_patch_that_many_tasks_share_is_written_once(pool, method, monkeypatch):
    written: list[int] = []
    write = worker_process.SharedMemory.write

    def note(self, start, pieces):
        written.append(start)
        return write(self, start, pieces)

    (task, *_) = tasks_for(method)
    tasks = [replace(task, client=replace(task.client, id=number % 4)) for number in range(12)]
    monkeypatch.setattr(pool, "_bundles", False)
    monkeypatch.setattr(worker_process.SharedMemory, "write", note)
    assert len([answer for answer in pool.run(tasks) if answer is not None]) == 12
    assert written.count(worker_process.START) <= 2 * MAILBOXES  # at most once for each mailbox of a worker
    assert len(written) >= 13


def test_nothing_to_do_is_done_at_once(pool):
    assert list(pool.run([])) == []
    assert pool.measure([]) == []


@pytest.fixture(scope="module")
def deployed() -> list[tuple[Patch, ...]]:
    """A whole network, a part of one, and several that answer together."""
    weights, half = MODEL.weights(), prefix(MODEL.groups, as_width("1/2"))
    whole, part = MODEL.cut(weights, Cut.everything()), MODEL.cut(weights, half)
    return [(whole,), (part,), (part, MODEL.cut({n: v * 2 for n, v in weights.items()}, half))]


@pytest.mark.parametrize("batch", [3, 20, 256])
def test_evaluation_in_workers_gives_the_same_bits(pool, deployed, batch, monkeypatch):
    """DATA has 20 test examples: seven batches with a short last one, one full batch, one that is not full."""
    monkeypatch.setattr("fedtailor.client.evaluate.EVALUATION_BATCH", batch)
    if batch != 256:  # the workers' own batches are of the usual size: let them have one each
        pool = Sharing(pool)
    assert pool.measure(deployed) == [evaluate_patches(MODEL, patches, DATA.test) for patches in deployed]


class Sharing:
    """Evaluates runs of batches as workers do, in this process."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool

    def measure(self, deployed, action="evaluate"):
        self.pool._work = self._work
        try:
            return self.pool.measure(deployed, action)
        finally:
            del self.pool._work

    def _work(self, pile):
        assert len({id(job.tensors) for job in pile.open}) == 1  # of all tiers, sent once
        for job in reversed(pile.open):
            deployed, batches = evaluation_of(job.rest, job.tensors)
            scores = batch_scores(MODEL, deployed, DATA.test, batches)
            yield job, {"scores": [[list(score) for score in each] for each in scores]}
            yield None


def test_an_evaluation_whose_workers_die_is_done_here(pool, deployed, monkeypatch):
    def dying(pile):
        while pile.open:
            pile.given()
            yield pile.open[0], Lost("signal 9")

    monkeypatch.setattr(pool, "_work", dying)
    assert pool.measure(deployed) == [evaluate_patches(MODEL, patches, DATA.test) for patches in deployed]


def test_an_impostor_is_refused_under_its_own_name(pool, method):
    method.tell("impostor")
    tasks = tasks_for(method)
    theirs = [answer for answer in pool.run(tasks) if isinstance(answer, Refused)]
    ours = [answer for answer in InProcess(method, MODEL, DATA).run(tasks) if isinstance(answer, Refused)]
    assert ours == theirs == [Refused(2, 0, "wrong-client", "answers for client 1")]


def test_a_worker_killed_while_idle_is_not_missed(pool, method, expected):
    for pid in pool.pids[:1]:
        os.kill(pid, signal.SIGKILL)
    assert_same(expected, there(method, pool))


@pytest.mark.parametrize("habit", ["kill", slow_if("exhaust", "exhaust")])
def test_a_task_whose_worker_dies_once_is_done_again_with_the_same_seed(habit, pool, method, expected):
    method.tell(habit)
    assert_same(expected, there(method, pool))
    assert method.times == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("mistake"), "ValueError: mistake"),
        (FedtailorError("expected less"), "expected less"),
        (MemoryError(), None),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            None,
        ),
        (ConnectionResetError(), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_a_worker_says_before_it_ends(error, told):
    """A mistake is told, and ends the run as it would without workers; a lack of memory is a death like others."""
    said: list[str] = []

    class Desk:
        def put(self, kind, value):
            said.append(value)

    report_failure(Desk(), type(error), error, None)
    assert said == ([] if told is None else [told])


@pytest.mark.slow
def test_a_client_whose_workers_die_twice_is_refused_and_the_round_goes_on(pool, method):
    method.tell("kill", again=True)
    result = there(method, pool, every=100, fleet="equal")
    assert method.times == 2
    assert result.records[0].cohort.refused == {"worker-died": 1}
    assert result.records[0].cohort.merged == 3
    without = here(method, every=100, fleet="equal", engine=lambda inner: Skipping(inner, 2))
    assert differing(result.state.weights, without.state.weights) == set()


class Skipping:
    """An engine that never asks one client."""

    def __init__(self, inner: InProcess, client: int) -> None:
        self.inner, self.client = inner, client

    def run(self, tasks):
        return self.inner.run([task for task in tasks if task.client.id != self.client])


def test_an_exception_in_a_worker_costs_its_client_alone(pool, method):
    method.tell("raise", again=True)
    result = there(method, pool, every=100, fleet="equal")
    assert result.records[0].failed == {"ZeroDivisionError: the user's own mistake": ("2",)}
    in_process = run(method, MODEL, DATA, **{**SETTINGS, "every": 100, "fleet": "equal"})
    assert timeless(result.records) == timeless(in_process.records)
    assert method.times == 2  # once here, once there: no second worker has to try


def test_where_every_client_raises_the_traceback_of_the_worker_is_shown(pool, method):
    (task,) = tasks_for(method)[2:3]
    method.tell("raise", again=True)
    (answer,) = [each for each in pool.run([task]) if each is not None]
    assert isinstance(answer, Refused)
    told = str(nobody_got_through("round 1: no client got through", [answer]))
    assert told.startswith(
        "round 1: no client got through; the first, client 2, raised\nTraceback (most recent"
    )
    assert told.endswith("ZeroDivisionError: the user's own mistake")
    assert "odd_methods.py" in told


def test_what_fedtailor_refuses_in_a_worker_is_one_sentence(pool, method):
    method.tell("refuse", again=True)
    (answer,) = [each for each in pool.run(tasks_for(method)[2:3]) if each is not None]
    assert answer == Refused(
        2, 0, "failed", "training.lr = 3: expected less", "training.lr = 3: expected less"
    )
    told = str(nobody_got_through("round 1: no client got through", [answer]))
    assert (
        told == "round 1: no client got through; the first, client 2, refused: training.lr = 3: expected less"
    )


@pytest.mark.slow
def test_a_worker_that_shows_no_life_is_replaced(pool, method, expected, monkeypatch):
    monkeypatch.setattr(worker_process, "SILENCE_SECONDS", 2.5)
    method.tell("stop")
    assert_same(expected, there(method, pool))
    assert method.times == 1


def test_a_client_that_is_late_costs_no_more_than_the_deadline(pool, method, expected):
    warm = replace(tasks_for(method)[0], action="evaluate", lease=Lease(frozenset(), Cut.everything()))
    assert [answer for answer in pool.run([warm]) if answer is not None]  # so that starting does not count
    method.tell("sleep")
    started = time.monotonic()
    answers = list(Timely(pool, 3.0).run(tasks_for(method)))
    assert time.monotonic() - started < 3 + 1
    late = [answer for answer in answers if isinstance(answer, Refused)]
    assert Refused(2, 0, "late") in late
    assert all(answer.reason == "late" for answer in late)
    assert_same(expected, there(method, pool))  # the late answer turns up in no later round


@pytest.mark.slow
def test_an_answer_that_cannot_be_read_is_a_worker_that_died(pool, method, expected, monkeypatch):
    spoiled = []
    decode = worker_process.decode

    def misread(view):
        value = decode(view)
        if value is not None and not spoiled:
            spoiled.append(value)
            raise DecodeError("these bytes are no frame of this version")
        return value

    monkeypatch.setattr(worker_process, "decode", misread)
    assert_same(expected, there(method, pool))
    assert len(spoiled) == 1


@pytest.mark.slow
def test_a_forked_copy_of_the_parent_leaves_the_workers_alone(pool, method, expected):
    pids = pool.pids
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert pids
    assert all(alive(pid) for pid in pids)
    assert_same(expected, there(method, pool))


@pytest.mark.slow
def test_no_descriptor_thread_or_child_is_left(method):
    before = belongings()
    pool = WorkerPool(method.tell("none"), MODEL, DATA, 2)
    assert sum(answer is not None for answer in pool.run(tasks_for(method))) == 4
    pids = pool.pids
    assert len(pids) == 2
    pool.close()
    pool.close()  # once more does no harm
    assert belongings() == before
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(FedtailorError, match="closed"):
        next(pool.run(tasks_for(method)))


def test_a_pool_that_nobody_holds_ends_its_processes(method):
    pool = WorkerPool(method, MODEL, DATA, 1)
    pool.start()
    (pid,) = pool.pids
    del pool
    assert not alive(pid)


def test_no_workers_is_no_pool(method):
    with pytest.raises(FedtailorError, match="engine.workers = 0: expected at least 1"):
        WorkerPool(method, MODEL, DATA, 0)
