"""All clients one after the other in this process: the simplest engine, and the reference for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtailor.client.sgd import Diverged
from fedtailor.data.federated import FederatedData
from fedtailor.elastic.model import ElasticModel
from fedtailor.method import Method
from fedtailor.round import Dropped, Task, Update


@dataclass(frozen=True)
class InProcess:
    """A for loop over the tasks."""

    method: Method
    model: ElasticModel
    data: FederatedData

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Dropped]:
        """One result per task, in the order of the tasks."""
        for task in tasks:
            try:
                yield self.method.perform(task, self.data.client(task.client.id), self.model)
            except Diverged as error:
                yield Dropped(task.client.id, task.round, "diverged", str(error))
