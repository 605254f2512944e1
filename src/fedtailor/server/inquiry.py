"""Questions that clients answer without training, and what asking them costs.

They measure norm statistics (``calibrate``) or score their own networks (``evaluate``): forward passes, no backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.engines.engine import Engine
from fedtailor.messages import Refused, Task, Update
from fedtailor.record import Spent
from fedtailor.server.checking import check_answers
from fedtailor.server.setup import Setup


class Inquiry:
    """Asks clients through an engine, and keeps count of what could not be used and of what it cost."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup, self.engine = setup, engine
        self.refused: list[Refused] = []
        self.spent = Spent()

    def ask(self, tasks: Sequence[Task]) -> list[Update]:
        """The answers that can be used."""
        updates, refused = check_answers(tasks, self.engine.run(tasks), self.setup.model)
        self.refused += refused
        asked = {task.client.id: task for task in tasks}
        self.spent += Spent(
            sum(task.nbytes for task in tasks),
            sum(update.patch.nbytes for update in updates),
            sum(macs_of(asked[update.client], update, self.setup) for update in updates),
        )
        return updates


def macs_of(task: Task, update: Update, setup: Setup) -> int:
    """What a client computed to answer: one forward pass of every network that it ran, for each example.

    Examples are those that ``perform`` was given. Of a calibration in batches, a last batch of a single example is
    left out, because it has no variance and is not run. As in training, only clients whose answers can be used count.
    """
    examples = len(setup.data.examples_for(task.client.id, task.action))
    if task.action == "calibrate" and examples % setup.method.local.batch_size == 1:
        examples -= 1
    kept = setup.method.policy.kept_by_clients
    cuts = networks_run(task, update, setup.model) if kept else [task.patch.cut]
    return examples * sum(setup.model.cost(cut).macs for cut in cuts)


def networks_run(task: Task, update: Update, model: ElasticModel) -> list[Cut]:
    """Of a client that keeps its norm statistics: the whole network that it was sent, and its own part of it.

    An evaluation runs both. A calibration runs the whole network; the own one too, unless the client had statistics
    for it and they are, bit for bit, those that it still has afterwards.
    """
    whole, own = task.patch.cut, task.lease.cut
    if task.action == "evaluate":
        return [whole, own]
    names = norm.tagged_statistics(model, own)
    kept = all(
        name in task.memory and torch.equal(task.memory[name].cpu(), update.memory[name].cpu())
        for name in names
        if name in update.memory
    )
    return [whole] if kept else [whole, own]
