"""Loss and metrics of a piece of the model on some examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fedtailor.data.batches import Batch, Examples, batch_size
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.ensemble import mean_of
from fedtailor.elasticity.running.layout import to_run

# On a CPU the fastest of 32 to 1024: what a larger one computes falls out of the cache
EVALUATION_BATCH = 256

Score = tuple[int, dict[str, float]]  # the examples of one batch, and their mean loss and metrics


def evaluate_patches(model: ElasticModel, patches: Sequence[Patch], data: Examples) -> dict[str, float]:
    """Mean loss and metrics over the examples; several patches answer with the mean of their outputs."""
    return evaluate_deployed(model, [patches], data)[0]


def evaluate_deployed(
    model: ElasticModel, deployed: Sequence[Sequence[Patch]], data: Examples
) -> list[dict[str, float]]:
    """The same for several at once, in one pass over the examples: each batch is taken and prepared once for all."""
    return [mean_score(scores) for scores in batch_scores(model, deployed, data, batches_of(data))]


def batches_of(data: Examples) -> range:
    """The numbers of the batches in which examples are evaluated."""
    return range(-(-len(data) // EVALUATION_BATCH))


@torch.no_grad()
def batch_scores(
    model: ElasticModel, deployed: Sequence[Sequence[Patch]], data: Examples, batches: range
) -> list[list[Score]]:
    """What some of the batches score, for each of those that are deployed."""
    scores: list[list[Score]] = [[] for _ in deployed]
    ready = [[to_run(model, patch) for patch in patches] for patches in deployed]
    for number in batches:
        first = number * EVALUATION_BATCH
        batch = data.take(torch.arange(first, min(first + EVALUATION_BATCH, len(data))))
        for patches, found in zip(ready, scores, strict=True):
            output = mean_output(model, patches, batch)
            values = {"loss": model.objective.loss(output, batch).item()}
            values.update(
                {name: float(metric(output, batch)) for name, metric in model.objective.metrics.items()}
            )
            found.append((batch_size(batch), values))
    return scores


def mean_score(scores: Iterable[Score]) -> dict[str, float]:
    """The mean over all examples, summed in the order of the batches."""
    totals: dict[str, float] = {}
    examples = 0
    for count, values in scores:
        examples += count
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value * count
    return {name: total / examples for name, total in totals.items()}


def mean_output(model: ElasticModel, patches: Sequence[Patch], batch: Batch) -> Any:
    """The output of one patch, or the mean over several."""
    return mean_of([model.forward(patch.values, patch.cut, batch) for patch in patches])
