"""ScaleFL: width and depth shrink together along a table, and the last exit of a client teaches those before it.

Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023. Symbols: level l
has width s_l and ends at exit e_l; n = the exits that a client holds, y_j = what exit j answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from torch import Tensor

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Batch
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import ending, ending_at_any_of
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.elasticity.running.scaling import folded, scaler
from fedtailor.errors import require
from fedtailor.messages import ServerState, Task
from fedtailor.methods.depth.levels import Level, LevelMethod
from fedtailor.methods.registry import register


@register("scalefl")
@dataclass(frozen=True)
class ScaleFL(LevelMethod):
    """A table of levels, each a width and an exit; early exits learn from the labels and from the last one."""

    local: LocalTraining = LocalTraining(momentum=0.9, weight_decay=5e-4)
    norm: Policy = "static"
    weighting: Literal["samples", "count"] = "count"
    level_widths: tuple[
        WidthLike, ...
    ] = ()  # s_l of each level, ascending to 1; none: the authors' for four exits
    level_ends: tuple[int, ...] = ()  # e_l of each level, counted from 1; none: 1, 2, 3 ...
    scaler: bool = True  # divide layer outputs by the width while training, as HeteroFL does
    gamma: float = 0.05  # how much early exits learn from the last one; 0: nothing
    temperature: float = 3.0  # T, softens the answers that exits learn from
    labels_alone: float = 0.25  # the share of all rounds in which exits learn from the labels alone

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = tuple(as_width(width, "method.level_widths") for width in self.level_widths)
        object.__setattr__(self, "level_widths", widths)
        rising = list(widths) == sorted(widths) and (not widths or widths[-1] == 1)
        require(rising, "method.level_widths", self.level_widths, "widths that rise to 1, one for each level")
        rising = list(self.level_ends) == sorted(self.level_ends) and all(end >= 1 for end in self.level_ends)
        require(rising, "method.level_ends", self.level_ends, "numbers of exits in ascending order, from 1")
        require(0 <= self.gamma < math.inf, "method.gamma", self.gamma, "at least 0")
        soft = 0 < self.temperature < math.inf
        require(soft, "method.temperature", self.temperature, "a number above 0")
        require(0 <= self.labels_alone <= 1, "method.labels_alone", self.labels_alone, "a share from 0 to 1")

    def check_task(self, model: ElasticModel) -> None:
        if self.gamma > 0 and len(model.exits) > 1:
            model.learning_task.check_teaching(self.name, "method.gamma = 0")

    def table(self, model: ElasticModel) -> list[tuple[Fraction, int]]:
        """(s_l, e_l) of every level; refused where it does not fit the exits of the model."""
        count = len(model.exits)
        ends = self.level_ends or tuple(range(1, (len(self.level_widths) or count) + 1))
        widths = self.level_widths or usual_widths(count)
        require(ends[-1] == count, "method.level_ends", ends, f"{count} last, as many ends as the model has")
        require(
            len(widths) == len(ends),
            "method.level_widths",
            self.level_widths,
            f"{len(ends)} widths, one for each level",
        )
        return [(as_width(width), end) for width, end in zip(widths, ends, strict=True)]

    def levels(self, model: ElasticModel) -> tuple[Level, ...]:
        """The first s_l of all channels as far as exit e_l; in training with all exits before it."""
        found = []
        for width, end in self.table(model):
            cut, exits = prefix(model.groups, width, self.grid), model.exits[:end]
            found.append(Level(ending_at_any_of(cut, exits), ending(cut, exits[-1])))
        return tuple(found)

    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any:
        scale = scaler(model, cut, self.policy) if self.scaler else None
        return model.forward(weights, cut, batch, mode="train", scale=scale, all_exits=True)

    def as_deployed(self, state: ServerState, patch: Patch, model: ElasticModel) -> Patch:
        """The network that was trained: its factors folded into its weights."""
        return folded(model, patch, scaler(model, patch.cut, self.policy)) if self.scaler else patch

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """Sum of j L_j over n (n + 1) / 2; L_n = CE, and L_j = CE + gamma T^2 KL(y_n || y_j) for the others."""
        (answers,) = outputs
        losses = [model.objective.loss(answer, batch) for answer in answers]
        if len(answers) == 1:
            return losses[0]
        if self.gamma > 0 and task.round > self.labels_alone * (self.local.rounds or 0):
            teaching = model.learning_task
            losses = [
                own + self.gamma * teaching.taught(answer, answers[-1], batch, self.temperature)
                for own, answer in zip(losses[:-1], answers, strict=False)
            ] + losses[-1:]
        shares = [number * loss for number, loss in enumerate(losses, start=1)]
        return sum(shares[1:], shares[0]) / (len(answers) * (len(answers) + 1) / 2)


def usual_widths(count: int) -> tuple[Fraction, ...]:
    """The authors' table for a ResNet of four exits; for other numbers widths that rise evenly from 7/10 to 1.

    >>> [str(width) for width in usual_widths(4)], [str(width) for width in usual_widths(2)]
    (['7/10', '7/10', '3/4', '1'], ['7/10', '1'])
    """
    if count == 4:
        return (Fraction(7, 10), Fraction(7, 10), Fraction(3, 4), Fraction(1))
    steps = max(1, count - 1)
    return tuple(1 - Fraction(3, 10) * (count - 1 - number) / steps for number in range(count))
