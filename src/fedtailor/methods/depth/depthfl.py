"""DepthFL: every client trains the first blocks of the network, and its exits teach each other.

Kim, Yu, Kim, Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023. Symbols: d = the exits
that a client holds, y_i = what its exit i answers, w(t) = the weight of distillation in round t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Batch
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import ending, ending_at_any_of
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require
from fedtailor.messages import Task
from fedtailor.methods.depth.levels import Level, LevelMethod
from fedtailor.methods.registry import register


@register("depthfl")
@dataclass(frozen=True)
class DepthFL(LevelMethod):
    """Full width, as many blocks as fit, with all exits on the way: each learns from the labels and from the others."""

    local: LocalTraining = LocalTraining(weight_decay=1e-3, schedule="exponential", gamma=0.998)
    weighting: Literal["samples", "count"] = "count"
    distillation: bool = True  # exits learn from each other; false: from the labels alone
    ramp: int = 300  # rounds over which the weight of distillation rises to 1
    temperature: float = 1.0  # T, softens the answers that exits learn from

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.ramp >= 0, "method.ramp", self.ramp, "a number of rounds, at least 0")
        soft = 0 < self.temperature < math.inf
        require(soft, "method.temperature", self.temperature, "a number above 0")

    def check_task(self, model: ElasticModel) -> None:
        if self.distillation and len(model.exits) > 1:
            model.learning_task.check_teaching(self.name, "method.distillation = false")

    def levels(self, model: ElasticModel) -> tuple[Level, ...]:
        """The network as far as each exit; in training with all exits before it."""
        exits, whole = model.exits, Cut.everything()
        return tuple(
            Level(ending_at_any_of(whole, exits[: number + 1]), ending(whole, each))
            for number, each in enumerate(exits)
        )

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """Sum over i of CE(y_i, labels) + w(t) / (d - 1) * sum over j != i of KL(y_j || y_i); none reaches y_j."""
        (answers,) = outputs
        losses = [model.objective.loss(answer, batch) for answer in answers]
        total = sum(losses[1:], losses[0])
        if not self.distillation or len(answers) == 1:
            return total
        share = ramped(task.round, self.ramp) / (len(answers) - 1)
        for number, student in enumerate(answers):
            for teacher in (*answers[:number], *answers[number + 1 :]):
                total = total + share * model.learning_task.taught(student, teacher, batch, self.temperature)
        return total


def ramped(round: int, ramp: int) -> float:
    """w(t) = exp(-5 (1 - t / T)^2), 1 from round T on.

    >>> [round(ramped(t, 300), 4) for t in (0, 150, 300, 900)]
    [0.0067, 0.2865, 1.0, 1.0]
    """
    share = min(round, ramp) / ramp if ramp else 1.0
    return math.exp(-5 * (1 - share) ** 2)
