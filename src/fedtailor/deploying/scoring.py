"""How good a network or a file is on test examples: metrics, and the share of right answers in each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from fedtailor.client.evaluate import EVALUATION_BATCH, mean_score, measured
from fedtailor.data.batches import Batch, Examples, batch_size, target_of
from fedtailor.deploying.formats.base import Program
from fedtailor.deploying.inputs import Inputs
from fedtailor.objective import TASKS, LearningTask
from fedtailor.objective.metrics import Metric

MOST_EXAMPLES = 10_000  # spread evenly over the test examples
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Meaning:
    """What outputs mean, and how they are judged."""

    task: LearningTask
    metrics: Mapping[str, Metric]
    labels: Sequence[str] = ()
    structure: TreeSpec | None = None  # of the output; None: one tensor

    def output(self, answers: Sequence[Tensor]) -> Any:
        """The answers in the form in which the user's own module gives them."""
        return answers[0] if self.structure is None else tree_unflatten(list(answers), self.structure)


@dataclass(frozen=True)
class Score:
    """What was measured, on how many examples."""

    examples: int
    metrics: dict[str, float]
    classes: dict[str, float] = field(default_factory=dict)  # share of right answers, by the true class

    def as_data(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return {"examples": self.examples, "metrics": self.metrics, "classes": self.classes}


def score(program: Program, examples: Examples, meaning: Meaning) -> Score:
    """Metrics of a program on examples as it is given them."""
    found: list[tuple[int, dict[str, float]]] = []
    right: dict[int, list[int]] = {}
    for rows in torch.arange(len(examples)).split(EVALUATION_BATCH):
        batch = examples.take(rows)
        output = meaning.output(program(Inputs.of(batch)))
        found.append((batch_size(batch), measured(meaning.metrics, output, batch)))
        if meaning.task is TASKS["classification"] and isinstance(output, Tensor) and output.dim() == 2:
            _count(right, output, batch)
    names = dict(enumerate(meaning.labels))
    classes = {
        names.get(label, str(label)): good / count
        for label, (good, count) in sorted(right.items())
        if len(right) <= MOST_CLASSES
    }
    return Score(len(examples), mean_score(found, meaning.metrics), classes)


def _count(right: dict[int, list[int]], output: Tensor, batch: Batch) -> None:
    truth = target_of(batch).cpu()
    good = output.argmax(dim=-1).cpu() == truth
    for label in truth.unique().tolist():
        here = truth == label
        entry = right.setdefault(int(label), [0, 0])
        entry[0] += int(good[here].sum())
        entry[1] += int(here.sum())
