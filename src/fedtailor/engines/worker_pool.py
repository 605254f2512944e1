"""Clients in worker processes, one PyTorch thread each: all cores, the same bits as in one process.

start   → luggage (method, module, groups, data) in shared memory, once for all workers
task    → the patch and the rest in the wire format, in the worker's mailbox, longest task first
worker  → method.perform → the answer in the wire format, in the mailbox
a worker that dies → its task goes to another one, once; then the client counts as dropped
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import torch

from fedtailor.data.federated import FederatedData
from fedtailor.elastic.model import ElasticModel
from fedtailor.engines.engine import Answer
from fedtailor.engines.luggage import NotPortable, pack
from fedtailor.engines.shared_memory import SharedMemory
from fedtailor.engines.worker import machine_settings
from fedtailor.engines.worker_process import Died, WorkerProcess
from fedtailor.errors import FedtailorError, require
from fedtailor.method import Method
from fedtailor.round import Dropped, Task

TICK_SECONDS = 0.1  # how long the pool waits for an answer before it says that there is none yet
TRIES = 2  # how often a task is given out before its client counts as dropped
STARTS = 3  # workers in a row that may die before they are ready


class WorkerPool:
    """An engine of its own processes. Use it in a ``with`` block, or ``close`` it: no process is left behind."""

    def __init__(self, method: Method, model: ElasticModel, data: FederatedData, workers: int) -> None:
        require(workers >= 1, "engine.workers", workers, "at least 1")
        self.method, self.model, self.count = method, model, workers
        self._luggage = pack(luggage_for(method, model, data))
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._finalizer = weakref.finalize(self, _end, self._workers, self._luggage, os.getpid())

    def start(self, wanted: int | None = None) -> None:
        """Start what is missing of the workers, without waiting for them."""
        if not self._finalizer.alive:
            raise FedtailorError("this pool of workers is closed")
        while len(self._workers) < min(self.count, self.count if wanted is None else wanted):
            self._workers.append(WorkerProcess(self._luggage))

    @property
    def ready(self) -> bool:
        """Whether any worker can be given a task. Does not wait."""
        for worker in self._heard(0):
            self._listen(worker)
        return any(worker.ready for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [worker.pid for worker in self._workers]

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """One result per task, as they come; None when none came for a moment."""
        waiting = deque(sorted(tasks, key=self._effort, reverse=True))
        tries: Counter[int] = Counter()
        try:
            while waiting or self._busy():
                self.start(len(waiting) + len(self._busy()))
                self._give_out(waiting, tries)
                heard = self._heard(TICK_SECONDS)
                if not heard:
                    yield None
                for worker in heard or self._workers.copy():
                    task = worker.task
                    answer = self._listen(worker) if heard else self._look_after(worker)
                    if isinstance(answer, Lost) and task is not None and tries[id(task)] < TRIES:
                        waiting.appendleft(task)
                    elif isinstance(answer, Lost) and task is not None:
                        yield Dropped(task.client.id, task.round, "worker-died", answer.cause)
                    elif isinstance(answer, Answer):
                        yield answer
        finally:
            # Whoever is still at work was given up by the caller: nobody will listen to the answer.
            for worker in self._busy():
                self._remove(worker)

    def close(self) -> None:
        """End all processes and free their memory."""
        self._finalizer()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _effort(self, task: Task) -> int:
        """How long a task takes, compared with others: a long one that starts last is what everyone waits for."""
        train = task.action == "train"
        cost = self.method.work(task, self.model) if train else self.model.cost(task.patch.cut)
        return cost.macs * task.client.num_examples

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.task is not None]

    def _heard(self, seconds: float) -> list[WorkerProcess]:
        """The workers that have said something, or hung up."""
        return wait(self._workers, seconds)  # type: ignore[arg-type, return-value]

    def _give_out(self, waiting: deque[Task], tries: Counter[int]) -> None:
        for worker in self._workers.copy():
            if waiting and worker.ready and worker.task is None:
                try:
                    worker.give(waiting[0])
                except Died:  # before it was given anything
                    self._remove(worker)
                else:
                    tries[id(waiting.popleft())] += 1

    def _listen(self, worker: WorkerProcess) -> Answer | Lost | None:
        try:
            answer = worker.receive()
        except Died as error:
            return self._lost(worker, str(error))
        if worker.ready:
            self._failed_starts = 0
        return answer

    def _look_after(self, worker: WorkerProcess) -> Lost | None:
        try:
            worker.check_life()
        except Died as error:
            return self._lost(worker, str(error))
        return None

    def _lost(self, worker: WorkerProcess, reason: str) -> Lost:
        cause = f"{reason} ({worker.cause()})"
        self._remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise NotPortable(f"{STARTS} worker processes in a row ended before they were ready: {cause}")
        return Lost(cause)

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.end()


@dataclass(frozen=True)
class Lost:
    """A worker is gone, and with it what it was at."""

    cause: str


def luggage_for(method: Method, model: ElasticModel, data: FederatedData) -> dict[str, Any]:
    """What a worker needs to do tasks: the arguments of ``workshop_of``, and how PyTorch is set up here."""
    if os.name != "posix" or not sys.executable:
        raise NotPortable("worker processes need a POSIX system and a Python executable to start")
    devices = {tensor.device for tensor in (*model.module.parameters(), *model.module.buffers())}
    if any(device.type != "cpu" for device in devices):
        raise NotPortable(f"device = {', '.join(map(str, devices))}: worker processes run on the CPU")
    partition = data.partition
    return {
        "method": method,
        "module": model.module,
        "groups": model.groups,
        "example": model.example,
        "objective": model.objective,
        "examples": data.train,
        "partition": (torch.from_numpy(partition.order), torch.from_numpy(partition.offsets)),
        "machine": machine_settings(),
    }


def _end(workers: list[WorkerProcess], luggage: SharedMemory, owner: int) -> None:
    """What ``close`` does. A forked copy of the owner must not end the owner's workers."""
    if os.getpid() != owner:
        return
    while workers:
        workers.pop().end()
    luggage.close()
