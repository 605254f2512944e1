"""UniProb: every local step trains a random sub-network whose expected cost is the device's budget.

The baseline of Liao et al., "Adaptive Channel Sparsity for Federated Learning under System Heterogeneity" (Flado),
CVPR 2023: one activation probability for all channels of a client. Symbols: r_c = the client's share of the full
FLOPs, p = the probability, b = the mask of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.batches import Batch, Examples
from fedtailor.elastic.budget import Budget
from fedtailor.elastic.cost import Cost
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.expected import allowed_macs, uniform_probability
from fedtailor.elastic.groups import ChannelGroups
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.norm import Policy
from fedtailor.method import Method
from fedtailor.methods import register
from fedtailor.round import Task


@register("uniprob")
@dataclass(frozen=True)
class UniProb(Method):
    """Bernoulli channels, drawn anew for every step; the client holds, receives and returns the full model.

    Only the multiply-accumulates shrink: each step gathers the active channels into a small dense network.
    """

    honours: ClassVar[frozenset[str] | None] = frozenset({"width", "macs"})  # everyone holds the full model
    inactive: ClassVar[Literal["held", "active"]] = "active"  # a channel that was not drawn rests

    norm: Policy = "static"
    inverted_scaling: bool = True  # divide the outputs of drawn channels by p in training

    def cut_for(self, budget: Budget, model: ElasticModel) -> Cut:
        """Channels have no order: everyone is given the full model."""
        return Cut.everything()

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Solve the budget for p."""
        probability = uniform_probability(model, task.client.budget)
        return replace(
            task, memory={**task.memory, "probability": torch.tensor(probability, dtype=torch.float64)}
        )

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        probability = float(task.memory["probability"])
        if probability == 1:
            return [task.patch.cut]
        generator = task.seeds.numpy("active channels", client=task.client.id, round=task.round, step=step)
        units = {group: np.full(model.groups.widths[group], probability) for group in model.groups.elastic}
        return [draw_active(model.groups, units, generator)]

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        scale = None
        if self.inverted_scaling and cut != task.patch.cut:
            factor = 1 / float(task.memory["probability"])
            elastic = set(model.groups.elastic)
            scale = {
                layer: factor for layer, groups in model.groups.producers.items() if elastic & set(groups)
            }
        return model.forward(weights, cut, batch, mode="train", scale=scale)

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """On average exactly what the budget allows."""
        full = super().work(task, model)
        return replace(full, macs=min(full.macs, round(3 * allowed_macs(model, task.client.budget))))


def draw_active(
    groups: ChannelGroups,
    probabilities: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]],
    generator: np.random.Generator,
) -> Cut:
    """One Bernoulli draw per unit; a group that came out empty keeps the unit that was closest to staying."""
    channels = {}
    for group, probability in probabilities.items():
        chance = generator.random(len(probability))
        active = np.flatnonzero(chance < probability)
        channels[group] = active.tolist() if len(active) else [int(np.argmin(chance - probability))]
    return Cut.of(groups, channels)
