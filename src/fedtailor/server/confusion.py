"""Which classes the networks of a finished run get right: per tier, how often each class was taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.client.evaluate import EVALUATION_BATCH, mean_output
from fedtailor.data.batches import Examples, target_of
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.running.layout import to_run
from fedtailor.messages import ServerState
from fedtailor.objective import TASKS, accuracy, cross_entropy
from fedtailor.server.evaluation import deployed_to
from fedtailor.server.setup import Setup
from fedtailor.steps import step

MOST_CLASSES = 100
MOST_EXAMPLES = 10_000  # spread evenly over the test examples: it is one more evaluation


def confusion(setup: Setup, state: ServerState) -> dict[str, Any]:
    """``tiers``: tier -> true class -> answer -> examples; ``examples``: how many; ``names`` of the classes, if any.

    Nothing where an answer is not one class per example, and where clients evaluate networks of their own.
    """
    data, test = setup.data, setup.data.test
    own = setup.method.policy.kept_by_clients
    if own or not _answers_are_classes(setup) or not 2 <= data.num_classes <= MOST_CLASSES or not len(test):
        return {}
    step("counting what is taken for what")
    if len(test) > MOST_EXAMPLES:
        test = test.subset(torch.linspace(0, len(test) - 1, MOST_EXAMPLES).long())
    deployed = deployed_to(setup, state, setup.fleet.tiers)
    tables = [_table(setup, patches, test).tolist() for patches in deployed.networks]
    return {"examples": len(test), "names": list(data.label_names), "tiers": deployed.by_tier(tables)}


def _answers_are_classes(setup: Setup) -> bool:
    """Whether the largest output is the answer: shapes alone do not say so where the loss is the user's own."""
    task, objective = setup.model.learning_task, setup.model.objective
    usual = objective.loss is cross_entropy or accuracy in objective.metrics.values()
    return task is TASKS["classification"] and (usual or objective.task is not None)


@torch.no_grad()
def _table(setup: Setup, patches: Sequence[Patch], test: Examples) -> Tensor:
    """True class x answer, as counts; answers beyond the classes of the data are not told apart from none."""
    model, classes = setup.model, setup.data.num_classes
    ready = [to_run(model, patch) for patch in patches]
    counts = torch.zeros(classes * classes, dtype=torch.int64)
    for rows in torch.arange(len(test)).split(EVALUATION_BATCH):
        batch = test.take(rows)
        answers, truth = mean_output(model, ready, batch).argmax(dim=-1).cpu(), target_of(batch).cpu()
        known = answers < classes
        counts += torch.bincount((truth * classes + answers)[known], minlength=classes * classes)
    return counts.reshape(classes, classes)
