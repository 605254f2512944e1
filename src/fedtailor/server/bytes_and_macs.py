"""What a round costs: bytes that travel, without headers, and multiply-accumulates on clients.

Training and questions without training (calibration, evaluation on clients) are counted apart: they become
``RoundRecord.training`` and ``RoundRecord.measuring``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.messages import Task, Update
from fedtailor.record import Spent
from fedtailor.server.faults import Try
from fedtailor.server.setup import Setup


def training_spent(setup: Setup, tries: Sequence[Try]) -> Spent:
    """All tries of a round; abandoned ones cost too."""
    return Spent(
        sum(task.nbytes for tried in tries for task in tried.tasks),
        sum(update.patch.nbytes for tried in tries for update in tried.updates),
        sum(_training_macs(setup, tried) for tried in tries),
    )


def _training_macs(setup: Setup, tried: Try) -> int:
    examples = {update.client: update.metrics.get("examples", update.weight) for update in tried.updates}
    worked = [task for task in tried.tasks if task.client.id in examples]
    return sum(setup.method.work(task, setup.model).macs * int(examples[task.client.id]) for task in worked)


def asking_spent(setup: Setup, tasks: Sequence[Task], updates: Sequence[Update]) -> Spent:
    """Questions without training, and their answers."""
    asked = {task.client.id: task for task in tasks}
    return Spent(
        sum(task.nbytes for task in tasks),
        sum(update.patch.nbytes for update in updates),
        sum(macs_of(asked[update.client], setup) for update in updates),
    )


def macs_of(task: Task, setup: Setup) -> int:
    """What a client computed to answer a question: what ``Method.measuring_work`` says, for each example.

    Examples are those that ``perform`` was given. Of a calibration in batches, a last batch of a single example is
    left out, because it has no variance and is not run. As in training, only clients whose answers can be used count.
    """
    examples = len(setup.data.examples_for(task.client.id, task.action))
    if task.action == "calibrate" and examples % setup.method.local.batch_size == 1:
        examples -= 1
    return examples * setup.method.measuring_work(task, setup.model).macs
