"""Clients in worker processes, one PyTorch thread each: all cores, the same bits as in one process.

start   → luggage (method, module, groups, data) in shared memory, once for all workers
task    → the patch and the rest in the wire format, in a mailbox of the worker, longest task first; tiny ones together
        while many wait, one task ahead: whoever has answered goes on at once
worker  → method.perform → the answer in the wire format, in the mailbox
a worker that dies → its task goes to another one, once; then the client is refused
evaluation → in the same way, in runs of batches; aside: by workers that no task waits for, while the next round trains
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType

import torch

from fedtailor.data.batches import Examples
from fedtailor.data.federated import FederatedData, Parts
from fedtailor.data.partitions import Partition
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.protocol import Answer, LaterScores
from fedtailor.engines.values import Value
from fedtailor.engines.workers.jobs import Job, answers_of
from fedtailor.engines.workers.luggage import NotPortable, pack
from fedtailor.engines.workers.piles import SHARES, Lost, Measurement, Pile, bundled
from fedtailor.engines.workers.process import Died, WorkerProcess
from fedtailor.engines.workers.shared_memory import SharedMemory
from fedtailor.engines.workers.starts import Starts
from fedtailor.engines.workers.worker import Luggage, machine_settings
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Measure, Refused, Task
from fedtailor.method import Method
from fedtailor.steps import phase

TICK_SECONDS = 0.1  # how long the pool waits for an answer before it says that there is none yet


class WorkerPool:
    """An engine of its own processes. Use it in a ``with`` block, or ``close`` it: no process is left behind."""

    def __init__(self, method: Method, model: ElasticModel, data: FederatedData, workers: int) -> None:
        require(workers >= 1, "engine.workers", workers, "at least 1")
        self.method, self.model, self.data, self.count = method, model, data, workers
        self._luggage = pack(luggage_for(method, model, data).parts)
        self._workers: list[WorkerProcess] = []
        self._starts = Starts()
        self._bundles = True  # whether tiny tasks are given out together
        self._aside: Measurement | None = None  # what is done where nothing else waits
        self._finalizer = weakref.finalize(self, _end, self._workers, self._luggage, os.getpid())

    def start(self, wanted: int | None = None) -> None:
        """Start what is missing of the workers, without waiting for them."""
        if not self._finalizer.alive:
            raise FedtailorError("this pool of workers is closed")
        most = min(self.count, self.count if wanted is None else wanted)
        while len(self._workers) < most and self._starts.may():
            self._workers.append(WorkerProcess(self._luggage))

    @property
    def ready(self) -> bool:
        """Whether any worker can be given a task. Does not wait."""
        for worker in self._heard(0):
            self._note_aside(worker.job, self._listen(worker))
        return any(worker.ready for worker in self._workers)

    @property
    def starting(self) -> bool:
        """Whether all that can be done is to wait for workers: time that no client has had."""
        return not any(worker.ready for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [worker.pid for worker in self._workers]

    @property
    def hands_out(self) -> bool:
        """Whether workers are there to hand tasks to."""
        return self.ready

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """One result per task, as they come; None when none came for a moment."""
        most = self.count * SHARES if self._bundles else 0
        given = [(task, self._effort(task)) for task in tasks]
        pile = Pile(bundled(given, most, self.method.local.together))
        for done in self._work(pile):
            if done is None or not pile.settle(*done):
                yield None
                continue
            job, result = done
            if isinstance(result, Lost):
                for task in job.tasks:
                    yield Refused(task.client.id, task.round, "worker-died", result.cause)
                continue
            yield from answers_of(result, job.tasks)

    def measure(
        self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate"
    ) -> list[dict[str, float]]:
        """Loss and metrics of each, in one pass over the examples for it, which the workers share out between them."""
        measurement = self._measurement(deployed, action)
        self._finish(measurement)
        return measurement.scores()

    def measure_aside(self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate") -> LaterScores:
        """The same, by workers that no task waits for, until someone asks for the scores."""
        self._finish_aside()  # one at a time
        measurement = self._aside = self._measurement(deployed, action)
        self._give_out(measurement.pile)

        def scores() -> list[dict[str, float]]:
            if measurement is self._aside:
                self._finish_aside()
            return measurement.scores()

        return scores

    def _measurement(self, deployed: Sequence[Sequence[Patch]], action: Measure) -> Measurement:
        _, examples = self.data.measured[action]
        return Measurement(self.model, deployed, examples, action, self.count)

    def _finish_aside(self) -> None:
        """Wait for what is done aside, unless this pool was closed."""
        measurement, self._aside = self._aside, None
        if measurement is not None and self._finalizer.alive:
            self._finish(measurement)

    def _note_aside(self, job: Job | None, result: Value | Lost | None) -> None:
        if self._aside is not None and job is not None and job in self._aside.pile and result is not None:
            self._aside.take(job, result)

    def _finish(self, measurement: Measurement) -> None:
        for done in self._work(measurement.pile):
            if done is not None:
                measurement.take(*done)

    def _work(self, pile: Pile) -> Iterator[tuple[Job, Value | Lost] | None]:
        """Every job with what came of it, as they come; None when nothing came for a moment.

        Whoever listens tells the pile (``settle``): what was lost for the first time waits again.
        """
        begun = False
        try:
            while pile.open:
                self.start(len(pile) + len(self._busy()))
                self._hand_over(pile)
                if self._aside is not None:
                    self._give_out(self._aside.pile)
                if not begun:  # the caller may have something to do while everybody is at work
                    begun = True
                    yield None
                heard = self._heard(TICK_SECONDS)
                if not heard:
                    yield None
                for worker in heard or self._workers.copy():
                    if worker not in self._workers:  # it hung up while another was given something
                        continue
                    job = worker.job
                    result = self._listen(worker) if heard else self._look_after(worker)
                    self._hand_over(pile)  # before the caller looks at the answer: nobody waits for that
                    if job is None or job not in pile:
                        self._note_aside(job, result)
                    elif result is not None:
                        yield job, result
        finally:
            # Whoever is still at work on this was given up by the caller: nobody will listen to the answer.
            for worker in self._busy():
                if worker.job in pile:
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
        measuring = task.action in ("calibrate", "evaluate", "validate")
        cost = self.model.cost(task.patch.cut) if measuring else self.method.work(task, self.model)
        return cost.macs * task.client.num_examples

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.busy]

    def _heard(self, seconds: float) -> list[WorkerProcess]:
        """The workers that have said something, or hung up."""
        return wait(self._workers, seconds)  # type: ignore[arg-type, return-value]

    def _hand_over(self, pile: Pile) -> None:
        """To everybody a job; while many wait, one more, so that whoever has answered goes on at once."""
        self._give_out(pile)
        if pile:
            self._give_ahead(pile)
        elif self._take_back(pile):
            self._give_out(pile)

    def _give_out(self, pile: Pile) -> None:
        for worker in self._workers.copy():
            if pile and worker.ready and not worker.busy:
                try:
                    with phase("transfer"):
                        worker.give(pile.next)
                except Died:  # before it was given anything
                    self._remove(worker)
                else:
                    pile.given()

    def _give_ahead(self, pile: Pile) -> None:
        """A job that waits for each worker that is at one of the same pile, while enough others wait for everybody."""
        for worker in self._busy():
            if not worker.full and pile.may_wait(worker.job, self.count):
                # Who has hung up may have answered before: that is heard first, and then what became of it.
                with suppress(Died), phase("transfer"):
                    worker.give(pile.next)
                    pile.given()

    def _take_back(self, pile: Pile) -> bool:
        """Nobody idles beside a job that waits behind another: a client may take longer than it should."""
        idle = sum(worker.ready and not worker.busy for worker in self._workers)
        behind = [worker for worker in self._workers if worker.waiting in pile][:idle]
        for worker in behind:
            pile.taken_back(worker.withdraw())
        return bool(behind)

    def _listen(self, worker: WorkerProcess) -> Value | Lost | None:
        try:
            with phase("transfer"):
                answer = worker.receive()
        except Died as error:
            return self._lost(worker, str(error))
        if worker.ready:
            self._starts.worked()
        return answer

    def _look_after(self, worker: WorkerProcess) -> Lost | None:
        try:
            worker.check_life()
        except Died as error:
            return self._lost(worker, str(error))
        if worker.dawdles:  # one client's code holds up the others: from now on each has a worker for itself
            self._bundles = False
            return self._lost(worker, "its clients took too long together")
        return None

    def _lost(self, worker: WorkerProcess, reason: str) -> Lost:
        cause = f"{reason} ({worker.cause()})"
        self._remove(worker)
        if not worker.ready:
            self._starts.failed(cause)
        return Lost(cause, worker.waiting)

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.end()


def luggage_for(method: Method, model: ElasticModel, data: FederatedData) -> Luggage:
    """What a worker needs to do tasks, and how PyTorch is set up here."""
    if os.name != "posix" or not sys.executable:
        raise NotPortable("worker processes need a POSIX system and a Python executable to start")
    devices = {tensor.device for tensor in (*model.module.parameters(), *model.module.buffers())}
    if any(device.type != "cpu" for device in devices):
        raise NotPortable(f"device = {', '.join(map(str, devices))}: worker processes run on the CPU")
    return Luggage(
        method=method,
        module=model.module,
        groups=model.groups,
        network=model.network,
        example=model.example,
        objective=model.objective,
        examples=data.train,
        test=data.test,
        partition=_tensors(data.partition),
        tests=_own(data.tests),
        validation=_own(data.validation),
        machine=machine_settings(),
    )


def _own(parts: Parts | None) -> tuple[Examples, torch.Tensor, torch.Tensor] | None:
    return None if parts is None else (parts.examples, *_tensors(parts.partition))


def _tensors(partition: Partition) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(partition.order), torch.from_numpy(partition.offsets)


def _end(workers: list[WorkerProcess], luggage: SharedMemory, owner: int) -> None:
    """What ``close`` does. A forked copy of the owner must not end the owner's workers."""
    if os.getpid() != owner:
        return
    while workers:
        workers.pop().end()
    luggage.close()
