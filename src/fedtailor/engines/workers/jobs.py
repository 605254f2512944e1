"""What a worker is given, and what it hands back: tasks and answers of one job in few values and few tensors.

What the tasks of a job have in common travels once: clients of one piece differ in little more than their number, and
their answers in what the tensors hold. A hundred of them as values of their own cost the server more than training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.engines.protocol import Answer
from fedtailor.engines.values import (
    Tensors,
    Value,
    answer_of,
    answer_value,
    masked_cut,
    plain_number,
    task_of,
    task_value,
)
from fedtailor.messages import Client, Task, Update


@dataclass(frozen=True)
class Job:
    """What a worker is given: tasks of clients, or some batches of the test examples to evaluate all tiers on.

    Tensors travel by themselves, because several jobs may share them; tasks of one job do.
    """

    tensors: Tensors
    rest: Value
    effort: int  # compared with other jobs
    tasks: tuple[Task, ...] = ()
    together: bool = False  # the tasks are trained at once, and stay together

    @property
    def nbytes(self) -> int:
        """How much memory its tensors take."""
        return sum(value.nbytes for each in self.tensors for value in each.values())

    @property
    def parts(self) -> list[Job]:
        """Its tasks as jobs of their own."""
        share = self.effort // max(1, len(self.tasks))
        return [job_of([(task, share)], self.tensors) for task in self.tasks]


def job_of(tasks: Sequence[tuple[Task, int]], tensors: Tensors, together: bool = False) -> Job:
    """A job of tasks that share the tensors of their patches, each with its effort."""
    those = tuple(task for task, _ in tasks)
    rest = {**tasks_value(those), "together": together}
    return Job(tensors, rest, sum(effort for _, effort in tasks), those, together)


def tasks_value(tasks: Sequence[Task]) -> Value:
    """Tasks that share the tensors of their patch."""
    first = tasks[0]
    if len(tasks) == 1 or not all(_alike(task, first) for task in tasks):
        return {"tasks": [task_value(task) for task in tasks]}
    own = [
        [task.client.id, task.client.num_examples, task.client.slot, task.lease.nonce, task.memory_round]
        for task in tasks
    ]
    return {"first": task_value(first), "own": own}


def _alike(task: Task, first: Task) -> bool:
    """Whether two tasks differ in client, nonce and round of the memory alone, which is empty."""
    if task.memory or task.levels is not None or masked_cut(task).mask is not None:
        return False
    same_budget = task.client.budget is first.client.budget or task.client.budget == first.client.budget
    return same_budget and _common(task) == _common(first)


def _common(task: Task) -> tuple[Any, ...]:
    lease = task.lease
    leased = (lease.names, lease.cut, lease.partial, lease.most_metrics, lease.memory)
    return id(task.patch.cut), task.client.tier, task.round, task.seeds.root, task.action, leased


def tasks_of(value: Mapping[str, Any], patch: Mapping[str, Tensor]) -> list[Task]:
    """The inverse of ``tasks_value``."""
    if "tasks" in value:
        return [task_of(each, patch) for each in value["tasks"]]
    first = task_of(value["first"], patch)
    client, lease = first.client, first.lease
    return [
        Task(
            client=Client(number, client.tier, client.budget, examples, slot),
            round=first.round,
            patch=first.patch,
            lease=lease.with_nonce(nonce),
            seeds=first.seeds,
            action=first.action,
            memory_round=memory_round,
        )
        for number, examples, slot, nonce, memory_round in value["own"]
    ]


def answers_value(answers: Sequence[Answer]) -> Value:
    """Answers to the tasks of one job, in their order."""
    updates = [answer for answer in answers if isinstance(answer, Update)]
    # One by itself travels as a row where it is one already: a single tensor costs the server a fraction of ten
    several = len(updates) > 1 or any(each.patch.row is not None for each in updates)
    if len(updates) < len(answers) or not several or not _stackable(updates):
        return {"answers": [answer_value(answer) for answer in answers]}
    first, names = updates[0], list(updates[0].metrics)
    types = list(dict.fromkeys(value.dtype for value in first.patch.values.values()))
    own = [
        [each.client, each.round, each.base_round, each.nonce, plain_number(each.weight)] for each in updates
    ]
    return {
        "own": own,
        "names": names,
        "metrics": [[plain_number(each.metrics[name]) for name in names] for each in updates],
        "cut": cut_value(first.patch.cut),
        "columns": {
            name: [types.index(value.dtype), list(value.shape)] for name, value in first.patch.values.items()
        },
        "tables": [_table(updates, dtype) for dtype in types],
    }


def _table(updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """All numbers of a type, a row for each update."""
    rows = [each.patch.row for each in updates if each.patch.row is not None]
    if len(rows) == len(updates):
        table = updates[0].patch.table
        whole = table is not None and table.shape[0] == len(updates)
        if whole and all(
            each.patch.table is table and each.patch.place == n for n, each in enumerate(updates)
        ):
            return cast(Tensor, table)
        return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)
    numbers = [v.reshape(-1) for each in updates for v in each.patch.values.values() if v.dtype == dtype]
    return torch.cat(numbers).view(len(updates), -1)


def _stackable(updates: Sequence[Update]) -> bool:
    """Whether they are of one piece, name by name and shape by shape, and nobody remembers anything."""
    first = updates[0]
    if not first.patch.values:
        return False
    form = [(name, value.shape, value.dtype, value.device) for name, value in first.patch.values.items()]
    return first.patch.cut.mask is None and all(
        each.patch.cut is first.patch.cut
        and not each.memory
        and each.metrics.keys() == first.metrics.keys()
        and form
        == [(name, value.shape, value.dtype, value.device) for name, value in each.patch.values.items()]
        for each in updates
    )


def answers_of(value: Mapping[str, Any], tasks: Sequence[Task]) -> list[Answer]:
    """The inverse of ``answers_value``; whether they may be merged is for the server to check."""
    if "answers" in value:
        found: list[Answer] = []
        for task, each in zip(tasks, value["answers"], strict=True):
            mask = masked_cut(task).mask
            found.append(answer_of(each, None if mask is None else mask.levels))
        return found
    cut, leased = cut_from(value["cut"]), tasks[0].lease.cut
    cut = leased if cut == leased else cut
    patches = Patch.of_rows(value["tables"], value["columns"], cut)
    return [
        Update(
            client,
            round,
            base_round,
            patch,
            weight,
            dict(zip(value["names"], metrics, strict=True)),
            {},
            nonce,
        )
        for patch, (client, round, base_round, nonce, weight), metrics in zip(
            patches, value["own"], value["metrics"], strict=True
        )
    ]
