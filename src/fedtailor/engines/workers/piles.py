"""Jobs that wait for a worker, and an evaluation as such jobs."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtailor.client.evaluate import Score, batch_scores, batches_of, mean_score
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.protocol import flocks
from fedtailor.engines.values import Tensors, Value, evaluation_value
from fedtailor.engines.workers.jobs import Job, job_of
from fedtailor.messages import Measure, Task

TRIES = 2  # how often a job is given out before it is lost
SHARES = 4  # jobs for each worker at least: one that is slower than the others is given fewer of them
TINY_EFFORT = 100_000_000  # multiply-accumulates forward: about fifty milliseconds of training
BUNDLE_BYTES = 8 * 2**20  # of answers that are left in a mailbox together
AHEAD_BYTES = 8 * 2**20  # of a job that waits in a mailbox: more than that trains for longer than any wait


@dataclass(frozen=True)
class Lost:
    """A worker is gone, and with it what it was at; a job that waited behind that has not begun."""

    cause: str
    waiting: Job | None = None


class Pile:
    """Jobs that belong together, those with most effort first."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._waiting = deque(sorted(jobs, key=lambda job: job.effort, reverse=True))
        self._tries: Counter[int] = Counter()
        self._open = {id(job): job for job in jobs}

    def __contains__(self, job: Job | None) -> bool:
        return id(job) in self._open

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def open(self) -> list[Job]:
        """Those that are neither done nor lost for good."""
        return list(self._open.values())

    @property
    def next(self) -> Job:
        """The one that waits for the next worker."""
        return self._waiting[0]

    def may_wait(self, behind: Job | None, workers: int) -> bool:
        """Whether the next one may be given to a worker that is at another job, to be there when that is done.

        Only while there is so much behind it that the other workers are busy until then: the last jobs go to whoever is
        free first. And not behind a job of another pile, of which nobody can tell how long it takes in comparison.
        """
        if behind is None or behind not in self or len(self) <= workers:
            return False
        wanted = workers * behind.effort
        for job in itertools.islice(self._waiting, 1, None):  # no further than need be: many may wait
            wanted -= job.effort
            if wanted <= 0:
                return self.next.nbytes <= AHEAD_BYTES
        return False

    def given(self) -> None:
        """A worker has the next one."""
        self._tries[id(self._waiting.popleft())] += 1

    def taken_back(self, job: Job) -> None:
        """A worker had it, but has not begun with it."""
        self._waiting.appendleft(job)
        self._tries[id(job)] -= 1

    def settle(self, job: Job, result: Value | Lost) -> bool:
        """What came of a job; False if it was lost and waits again, its tasks one by one: any may be why.

        Tasks that are trained together stay so: apart they would round otherwise. A job that waited behind the lost one
        waits here again.
        """
        if isinstance(result, Lost) and result.waiting is not None:
            self.taken_back(result.waiting)
        if isinstance(result, Lost) and self._tries[id(job)] < TRIES:
            again = [job] if len(job.tasks) < 2 or job.together else self._apart(job)
            self._waiting.extendleft(again)
            return False
        del self._open[id(job)]
        return True

    def _apart(self, job: Job) -> list[Job]:
        """The tasks of a job that was given out before, each by itself, and each with one try left."""
        del self._open[id(job)]
        parts = job.parts
        for part in parts:
            self._open[id(part)] = part
            self._tries[id(part)] = TRIES - 1
        return parts


def bundled(tasks: Sequence[tuple[Task, int]], least: int, together: int = 1) -> list[Job]:
    """Jobs of tasks, each with its effort: tiny ones that share a patch go together, so that handing over is little.

    About so many jobs as ``least``, or a multiple (0: each task by itself), and all alike: who was given slow ones is
    helped out by others, and workers are through at once. Tasks that are trained ``together`` are one job.
    """
    shared: dict[int, Tensors] = {}  # of one patch that many tasks carry, the tensors are sent once
    by_patch: dict[int, list[tuple[Task, int]]] = {}
    for task, effort in tasks:
        shared.setdefault(id(task.patch), [dict(task.patch.values)])
        by_patch.setdefault(id(task.patch), []).append((task, effort))
    if together > 1:
        efforts = {id(task): effort for task, effort in tasks}
        return [
            job_of([(task, efforts[id(task)]) for task in flock], shared[id(flock[0].patch)], len(flock) > 1)
            for flock in flocks([task for task, _ in tasks], together)
        ]
    total = sum(effort for _, effort in tasks)
    count = least * max(1, -(-total // (TINY_EFFORT * least))) if least else 0
    jobs: list[Job] = []
    for patch, group in by_patch.items():
        jobs += [job_of(part, shared[patch]) for part in _parted(group, total / count if count else 0)]
    return jobs


def _parted(tasks: Sequence[tuple[Task, int]], share: float) -> Iterator[list[tuple[Task, int]]]:
    """Tasks of one patch in runs that are alike: each ends where so much effort, or a multiple of it, is reached."""
    size = sum(value.nbytes for value in tasks[0][0].patch.values.values())
    room = max(1, BUNDLE_BYTES // max(1, size))
    part: list[tuple[Task, int]] = []
    spent, ends = 0, share
    for task, effort in tasks:
        if part and (len(part) >= room or spent + effort / 2 > ends):
            yield part
            part = []
        while spent + effort / 2 > ends > 0:
            ends += share
        part.append((task, effort))
        spent += effort
    yield part


class Measurement:
    """What is deployed, scored in one pass over the examples, which workers share out between them."""

    def __init__(
        self,
        model: ElasticModel,
        deployed: Sequence[Sequence[Patch]],
        examples: Examples,
        action: Measure,
        workers: int,
    ) -> None:
        self._model, self._deployed, self._examples = model, deployed, examples
        tensors = [dict(each.values) for patches in deployed for each in patches]  # sent once to each worker
        shares = _shares(batches_of(examples), workers * SHARES)
        jobs = [Job(tensors, evaluation_value(deployed, share, action), len(share)) for share in shares]
        self._batches = {id(job): share for job, share in zip(jobs, shares, strict=True)}
        self._scores: list[dict[int, Score]] = [{} for _ in deployed]
        self.pile = Pile(jobs)

    def take(self, job: Job, result: Value | Lost) -> None:
        """The scores of some batches, or word that their worker is gone."""
        if self.pile.settle(job, result):
            batches = self._batches.pop(id(job))
            if isinstance(result, Lost):
                self._score_here(batches)
            else:
                self._add(batches, [[(n, values) for n, values in each] for each in result["scores"]])

    def scores(self) -> list[dict[str, float]]:
        """Loss and metrics of each that is deployed, the same to the bit whoever scored what.

        What no worker has scored, because there are none any more, is scored here.
        """
        for batches in self._batches.values():
            self._score_here(batches)
        self._batches.clear()
        metrics = self._model.objective.metrics
        return [mean_score((each[batch] for batch in sorted(each)), metrics) for each in self._scores]

    def _score_here(self, batches: range) -> None:
        """In this process an evaluation that workers die of can only fail with a message."""
        self._add(batches, batch_scores(self._model, self._deployed, self._examples, batches))

    def _add(self, batches: range, found: Sequence[Sequence[Score]]) -> None:
        for each, those in zip(self._scores, found, strict=True):
            each.update(zip(batches, those, strict=True))


def _shares(batches: range, count: int) -> list[range]:
    """Batches in runs of nearly equal length.

    >>> _shares(range(5), 2)
    [range(0, 2), range(2, 5)]
    """
    edges = [len(batches) * number // count for number in range(count + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges) if first < last]
