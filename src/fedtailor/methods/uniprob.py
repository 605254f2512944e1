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
from fedtailor.elasticity.cutting.unit_vectors import Place, Vector
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
    slowed_filters: bool = False  # multiply the gradient of a drawn filter by p, as FedDrop's code does

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
        if cut != task.patch.cut:
            probabilities = self.probabilities(task, model)
            scale = self.scale(probabilities, cut, weights, model) if self.inverted_scaling else None
            weights = slowed(weights, probabilities, cut, model) if self.slowed_filters else weights
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


class _Slowed(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


def slowed(
    weights: Mapping[str, Tensor], probabilities: Vector, cut: Cut, model: ElasticModel
) -> dict[str, Tensor]:
    """The same weights, the gradient of each filter multiplied by the probability p of the unit that it makes.

    A filter is drawn with probability p and its output divided by p: the mean of its gradient over draws is that of a
    dense step, its variance (1 - p) / p times the square of that. The factor makes the mean p, the variance p^2 times
    as large: filters of small clients move less, and no single step far.
    """
    found = model.once(("filters",), lambda: _filters(model))
    return {
        name: _Slowed.apply(value, _along(found[name], probabilities, cut, value, model))  # type: ignore[no-untyped-call]
        if name in found
        else value
        for name, value in weights.items()
    }


def _filters(model: ElasticModel) -> dict[str, Place]:
    """Of every weight and bias of a layer that makes units, the axis on which these lie."""
    owned = [name for name in model.parameters if name.rpartition(".")[0] in model.groups.producers]
    made = {name: model.units.made_by(name) for name in owned}
    return {name: place for name, place in made.items() if place is not None}


def _along(place: Place, probabilities: Vector, cut: Cut, like: Tensor, model: ElasticModel) -> Tensor:
    shape = [1] * like.dim()
    shape[place.dim] = -1
    return model.units.along(torch.from_numpy(probabilities).to(like), place, cut).view(shape)


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
