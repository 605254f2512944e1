"""Loss and metrics of a piece of the model on some examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedtailor.data.batches import Batch, Examples, batch_size
from fedtailor.elastic.ensemble import mean_of
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.patch import Patch

EVALUATION_BATCH = 256


@torch.no_grad()
def evaluate_patches(model: ElasticModel, patches: Sequence[Patch], data: Examples) -> dict[str, float]:
    """Mean loss and metrics over the examples; several patches answer with the mean of their outputs."""
    totals: dict[str, float] = {}
    for chosen in torch.arange(len(data)).split(EVALUATION_BATCH):
        batch = data.take(chosen)
        output = mean_output(model, patches, batch)
        values = {"loss": model.objective.loss(output, batch).item()}
        values.update(
            {name: float(metric(output, batch)) for name, metric in model.objective.metrics.items()}
        )
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value * batch_size(batch)
    return {name: total / len(data) for name, total in totals.items()}


def mean_output(model: ElasticModel, patches: Sequence[Patch], batch: Batch) -> Any:
    """The output of one patch, or the mean over several."""
    return mean_of([model.forward(patch.values, patch.cut, batch) for patch in patches])
