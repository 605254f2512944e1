"""Loss and metrics of a piece of the model on some examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fedtailor.data.batches import Batch, Examples, batch_size
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.ensemble import mean_of
from fedtailor.elasticity.running.layout import to_run
from fedtailor.objective import Metric
from fedtailor.objective.summed import Summed, part, worked_out

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
    found = batch_scores(model, deployed, data, batches_of(data))
    return [mean_score(scores, model.objective.metrics) for scores in found]


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
            values.update(measured(model.objective.metrics, output, batch))
            found.append((batch_size(batch), values))
    return scores


def measured(metrics: Mapping[str, Metric], output: Any, batch: Batch) -> dict[str, float]:
    """The metrics of one batch; of those that are made of sums the sums, for each example of the batch."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Summed):
            sums, examples = metric.sums(output, batch), batch_size(batch)
            found.update({part(name, key): value / examples for key, value in sums.items()})
        else:
            found[name] = float(metric(output, batch))
    return found


def mean_score(scores: Iterable[Score], metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
    """The mean over all examples, summed in the order of the batches; metrics of sums are worked out of theirs."""
    totals: dict[str, float] = {}
    examples = 0
    for count, values in scores:
        examples += count
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value * count
    means = {name: total / examples for name, total in totals.items()}
    return worked_out(means, metrics or {})


def mean_output(model: ElasticModel, patches: Sequence[Patch], batch: Batch) -> Any:
    """The output of one patch, or the mean over several."""
    return mean_of([model.forward(patch.values, patch.cut, batch) for patch in patches])
