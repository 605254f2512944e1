"""What an engine is: it maps ``perform`` over tasks and knows nothing else. ``opening`` says which one a run uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from fedtailor.client.sgd import Diverged
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Measure, Refused, Task, Update
from fedtailor.method import Method

Answer = Update | Refused
LaterScores = Callable[[], list[dict[str, float]]]  # waits for them, if need be


class Engine(Protocol):
    """Runs tasks; a client that fails is a value among the results, not an exception."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """One result per task, in any order.

        None says that nothing has arrived for a moment: an engine that waits for others never waits for long, so that
        its caller can keep a deadline. Whoever stops listening before the end closes the iterator.
        """
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


def answer_to(task: Task, method: Method, data: Examples, model: ElasticModel) -> Answer:
    """Do a task where the client's data is, and refuse at the source what nobody else could put down to this client."""
    try:
        update = method.perform(task, data, model)
    except Diverged as error:
        return Refused(task.client.id, task.round, "diverged", str(error))
    if update.client != task.client.id:
        return Refused(task.client.id, task.round, "wrong-client", f"answers for client {update.client}")
    return update
