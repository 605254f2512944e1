"""What a round costs: bytes that travel, without headers, and multiply-accumulates on clients.

Training and questions without training (calibration, evaluation on clients) are counted apart: they become
``RoundRecord.training``, with its parts ``by_tier``, and ``RoundRecord.measuring``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.messages import Task, Update
from fedtailor.record import Spent, TierSpent
from fedtailor.server.faults import Try
from fedtailor.server.setup import Setup


def training_spent(setup: Setup, tries: Sequence[Try]) -> dict[str, TierSpent]:
    """All tries of a round, by the tier that each client had in it; abandoned tries cost too."""
    spent: dict[str, list[TierSpent]] = {tier.name: [] for tier in setup.fleet.tiers}
    known = frozenset(setup.model.parameters)
    held: dict[int, int] = {}  # by the id of a patch: parameters; clients of one piece were sent the same one
    for tried in tries:
        updates = {update.client: update for update in tried.updates}
        for task in tried.tasks:
            if id(task.patch) not in held:
                held[id(task.patch)] = _parameters(task.patch, known)
            sent = TierSpent(task.nbytes, asked=1, parameters=held[id(task.patch)])
            spent[task.client.tier].append(_spent_on(setup, task, sent, updates.get(task.client.id)))
    return {tier: TierSpent.total(each) for tier, each in spent.items() if each}


def _parameters(patch: Patch, known: Collection[str]) -> int:
    return sum(value.numel() for name, value in patch.values.items() if plain(name) in known)


def _spent_on(setup: Setup, task: Task, sent: TierSpent, update: Update | None) -> TierSpent:
    """One client's part; of one whose answer cannot be used, no more is known than what it was sent."""
    if update is None:
        return sent
    examples = int(update.metrics.get("examples", update.weight))
    macs = setup.method.work(task, setup.model).macs * examples
    return TierSpent(
        sent.bytes_down, update.patch.nbytes, macs, sent.asked, 1, examples, parameters=sent.parameters
    )


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
    examples = setup.data.count_for(task.client.id, task.action)
    if task.action == "calibrate" and examples % setup.method.local.batch_size == 1:
        examples -= 1
    return examples * setup.method.measuring_work(task, setup.model).macs
