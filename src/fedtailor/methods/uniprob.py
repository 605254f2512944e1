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
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.expected import allowed_macs, uniform_probability
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.shells import Scale
from fedtailor.messages import ServerState, Task
from fedtailor.method import Method
from fedtailor.methods.registry import register


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

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """Channels have no order: everyone is given the full model, if the budget can be met at all."""
        uniform_probability(model.costs, budget)
        return Cut.everything()

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Solve the budget for p."""
        probability = uniform_probability(model.costs, task.client.budget)
        return replace(task, prepared={**task.prepared, "probability": probability})

    def probabilities(self, task: Task, model: ElasticModel) -> Vector:
        """The probability of every unit in this client's steps."""
        return np.full(model.units.total, task.prepared["probability"])

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        probabilities = self.probabilities(task, model)
        if (probabilities == 1).all():
            return [task.patch.cut]
        generator = task.seeds.numpy("active channels", client=task.client.id, round=task.round, step=step)
        return [draw_active(model.groups, model.units.by_group(probabilities), generator)]

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        scale = None
        if self.inverted_scaling and cut != task.patch.cut:
            scale = self.scale(self.probabilities(task, model), cut, weights, model)
        return model.forward(weights, cut, batch, mode="train", scale=scale)

    def scale(
        self, probabilities: Vector, cut: Cut, weights: Mapping[str, Tensor], model: ElasticModel
    ) -> Scale:
        """1 / p for the outputs of every layer that makes channels."""
        first = float(probabilities[0])
        if (probabilities == first).all():
            elastic = set(model.groups.elastic)
            return {layer: 1 / first for layer, made in model.groups.producers.items() if elastic & set(made)}
        like = next(weight for weight in weights.values() if weight.is_floating_point())
        return model.units.on_outputs(torch.from_numpy(1 / probabilities).to(like), cut)

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """On average exactly what the budget allows."""
        full = super().work(task, model)
        return replace(full, macs=min(full.macs, round(3 * allowed_macs(model.costs, task.client.budget))))


def draw_active(
    groups: ChannelGroups,
    probabilities: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]],
    generator: np.random.Generator,
) -> Cut:
    """One Bernoulli draw per unit; a group with fewer units than it needs keeps those that were closest to staying."""
    channels = {}
    for group, probability in probabilities.items():
        margin = generator.random(len(probability)) - probability
        active = int((margin < 0).sum())
        count = groups.constraint(group).round_up(active, of=len(probability))
        channels[group] = np.sort(np.argsort(margin, kind="stable")[:count]).tolist()
    return Cut.of(groups, channels)
