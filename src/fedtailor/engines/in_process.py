"""All clients one after the other in this process: the simplest engine, and the reference for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.protocol import Answer, answers_to, flocks
from fedtailor.messages import Task
from fedtailor.method import Method


@dataclass(frozen=True)
class InProcess:
    """A for loop over the tasks."""

    method: Method
    model: ElasticModel
    data: FederatedData

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        """One result per task, in the order of the tasks unless some are trained together."""
        for flock in flocks(tasks, self.method.local.together):
            data = [self.data.examples_for(task.client.id, task.action) for task in flock]
            yield from answers_to(flock, self.method, data, self.model)
