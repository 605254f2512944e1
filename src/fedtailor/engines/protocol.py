"""What an engine is: it maps ``perform`` over tasks and knows nothing else. ``opening`` says which one a run uses."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from fedtailor.client.local_steps import Diverged
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.answers import fault_of
from fedtailor.errors import FedtailorError, in_words
from fedtailor.messages import Measure, Refused, Task, Update
from fedtailor.method import Method

Answer = Update | Refused
LaterScores = Callable[[], list[dict[str, float]]]  # waits for them, if need be

FAILED = "failed"  # the reason of a client whose code raised an exception
LAST_CALLS = 20  # that are told of where it did
LONGEST_TRACE = 20_000  # characters


class Engine(Protocol):
    """Runs tasks; a client that fails is a value among the results, not an exception."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """One result per task, in any order.

        None says that nothing has arrived for a moment: an engine that waits for others never waits for long, so that
        its caller can keep a deadline. Whoever stops listening before the end closes the iterator.
        """
        ...


@runtime_checkable
class Starting(Protocol):
    """An engine that may have to wait until it can work at all."""

    @property
    def starting(self) -> bool:
        """Whether nobody can be asked at the moment: such time is no client's."""
        ...


@runtime_checkable
class HandingOut(Protocol):
    """An engine that may have others work while it waits."""

    @property
    def hands_out(self) -> bool:
        """Whether ``run`` says None as soon as everybody is at work: its caller has time for something else then."""
        ...


@runtime_checkable
class Measuring(Protocol):
    """An engine whose workers can also evaluate what the server deploys."""

    def measure(
        self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate"
    ) -> list[dict[str, float]]:
        """Loss and metrics on test or validation examples, for each sequence of patches that answer together."""
        ...


@runtime_checkable
class MeasuringAside(Protocol):
    """An engine whose workers can do that while they also have tasks."""

    def measure_aside(self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate") -> LaterScores:
        """The same, by workers that no task waits for, so that it holds up nobody."""
        ...


def answer_to(
    task: Task, method: Method, data: Examples, model: ElasticModel, *, exhaustible: bool = False
) -> Answer:
    """Do a task where the client's data is, and refuse at the source what nobody else could put down to this client.

    Whatever a client's code raises costs this client alone. A process that is ``exhaustible`` may die of a lack of
    memory, because others can do its work again.
    """
    try:
        update = method.perform(task, data, model)
    except Diverged as error:
        return _checked(task, error)
    except Exception as error:  # the user's code, on this client's data: it may raise anything
        if exhaustible and is_exhaustion(error):
            raise
        return Refused(task.client.id, task.round, FAILED, in_words(error), _trace(error))
    return _checked(task, update)


def flocks(tasks: Sequence[Task], together: int) -> list[list[Task]]:
    """Tasks that are done at once: those that train one patch, in their order, at most so many; others by themselves.

    Who is with whom follows from the tasks alone, so that every engine gives the same bits.
    """
    if together == 1:
        return [[task] for task in tasks]
    of_patch: dict[int, list[Task]] = {}
    for task in tasks:
        of_patch.setdefault(id(task.patch) if task.action == "train" else id(task), []).append(task)
    return [
        same[first : first + together]
        for same in of_patch.values()
        for first in range(0, len(same), together)
    ]


def answers_to(
    tasks: Sequence[Task],
    method: Method,
    data: Sequence[Examples],
    model: ElasticModel,
    *,
    exhaustible: bool = False,
) -> list[Answer]:
    """The same for a flock; where anything raises, each by itself, which shows whose fault it is."""
    if len(tasks) > 1:
        try:
            found = method.train_together(tasks, data, model)
        except Exception as error:  # as above
            if exhaustible and is_exhaustion(error):
                raise
        else:
            return [_checked(task, each) for task, each in zip(tasks, found, strict=True)]
    return [
        answer_to(task, method, own, model, exhaustible=exhaustible)
        for task, own in zip(tasks, data, strict=True)
    ]


def _checked(task: Task, found: Update | Diverged) -> Answer:
    """What came of a task, if it has the form of an answer to it."""
    if isinstance(found, Diverged):
        return Refused(task.client.id, task.round, "diverged", str(found))
    reason, detail = fault_of(task, found)
    if reason:
        return Refused(task.client.id, task.round, reason, detail)
    if found.client != task.client.id:
        return Refused(task.client.id, task.round, "wrong-client", f"answers for client {found.client}")
    return found.marked(task.lease.nonce)


def is_exhaustion(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)  # how PyTorch says it


def _trace(error: Exception) -> str:
    """Where an exception came from; what fedtailor refuses says it all in its sentence."""
    if isinstance(error, FedtailorError):
        return str(error)
    text = "".join(traceback.format_exception(error, limit=-LAST_CALLS)).strip()
    half = LONGEST_TRACE // 2
    return text if len(text) <= LONGEST_TRACE else f"{text[:half]}\n ...\n{text[-half:]}"
