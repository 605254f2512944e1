"""One of the engines (``opening`` says which one a run uses): this process at first, workers where they pay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from fedtailor.client.evaluate import evaluate_deployed
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.protocol import Answer, LaterScores, flocks
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.messages import Measure, Task
from fedtailor.method import Method
from fedtailor.steps import OnNotice, step

HEAD_START_SECONDS = 3.0  # about what starting workers costs: runs that are shorter do better without


class Automatic:
    """Clients run in this process at first; once that has taken as long as starting workers would, workers take over.

    Both give the same bits, so neither the moment of the change nor a return to this process can be seen in a result.
    """

    def __init__(
        self, method: Method, model: ElasticModel, data: FederatedData, workers: int, on_notice: OnNotice
    ) -> None:
        self._here = InProcess(method, model, data)
        self._workers, self._on_notice = workers, on_notice
        self._pool: WorkerPool | None = None
        self._alone = 0.0  # seconds that this process has worked
        self._refused = False
        self._there = False  # whether workers are at it, and not this process

    @property
    def starting(self) -> bool:
        """Whether all that can be done is to wait for workers."""
        return self._there and self._pool is not None and self._pool.starting

    @property
    def hands_out(self) -> bool:
        """Whether the next round's clients are the workers' from the start."""
        return self._pool is not None and self._pool_is_ready()

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """One result per task."""
        left = {task.client.id: task for task in tasks}
        waiting = deque(flocks(tasks, self._here.method.local.together))
        while left:
            if self._pool_is_ready():
                yield from self._in_workers(left)
                continue
            flock = [left.pop(task.client.id) for task in waiting.popleft() if task.client.id in left]
            started = time.monotonic()
            answers = list(self._here.run(flock))
            self._alone += time.monotonic() - started
            yield from answers

    def measure(
        self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate"
    ) -> list[dict[str, float]]:
        """Loss and metrics of each on the test examples, or on those that choose."""
        if self._pool_is_ready():
            assert self._pool is not None
            try:
                return self._pool.measure(deployed, action)
            except NotPortable as error:
                self._do_without(error)
        started, (_, examples) = time.monotonic(), self._here.data.measured[action]
        scores = evaluate_deployed(self._here.model, deployed, examples)
        self._alone += time.monotonic() - started
        return scores

    def measure_aside(self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate") -> LaterScores:
        """The same while clients train; where there are no workers, at once."""
        if not self._pool_is_ready():
            found = self.measure(deployed, action)
            return lambda: found
        assert self._pool is not None
        later = self._pool.measure_aside(deployed, action)

        def scores() -> list[dict[str, float]]:
            try:
                return later()
            except NotPortable as error:
                self._do_without(error)
            return later()

        return scores

    def _in_workers(self, left: dict[int, Task]) -> Iterator[Answer | None]:
        """Let workers do what is left, and as much of it as they can."""
        assert self._pool is not None
        self._there = True
        try:
            for answer in self._pool.run(list(left.values())):
                if answer is not None:
                    left.pop(answer.client, None)
                yield answer
        except NotPortable as error:
            self._do_without(error)
        finally:
            self._there = False

    def _pool_is_ready(self) -> bool:
        if self._refused or self._alone < HEAD_START_SECONDS:
            return False
        try:
            if self._pool is None:
                step(f"starting {self._workers} workers")
                here = self._here
                self._pool = WorkerPool(here.method, here.model, here.data, self._workers)
                self._pool.start()
            return self._pool.ready
        except NotPortable as error:
            self._do_without(error)
            return False

    def _do_without(self, error: NotPortable) -> None:
        self._refused = True
        self.close()
        self._on_notice(f"all clients run in one process, on one core: {error}")

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Automatic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
