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
from fedtailor.objective import accuracy
from fedtailor.server.evaluation import deployed_to
from fedtailor.server.setup import Setup

MOST_CLASSES = 100
MOST_EXAMPLES = 10_000  # spread evenly over the test examples: it is one more evaluation


def confusion(setup: Setup, state: ServerState) -> dict[str, Any]:
    """``tiers``: tier -> true class -> answer -> examples; ``examples``: how many; ``names`` of the classes, if any.

    Nothing where an answer is not one class per example, and where clients evaluate networks of their own.
    """
    data, model = setup.data, setup.model
    test = data.test
    fit = 2 <= data.num_classes <= MOST_CLASSES and len(test) and test.targets.dim() == 1
    if not fit or accuracy not in model.objective.metrics.values() or setup.method.policy.kept_by_clients:
        return {}
    if len(test) > MOST_EXAMPLES:
        test = test.subset(torch.linspace(0, len(test) - 1, MOST_EXAMPLES).long())
    places, deployed = deployed_to(setup, state, setup.fleet.tiers)
    tables = [_table(setup, patches, test).tolist() for patches in deployed]
    by_tier = {tier: tables[place] for tier, place in places.items()}
    return {"examples": len(test), "names": list(data.label_names), "tiers": by_tier}


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
