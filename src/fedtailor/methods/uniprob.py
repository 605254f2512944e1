"""UniProb: every local step trains a random sub-network whose expected cost is the device's budget.

The baseline of Liao et al., "Adaptive Channel Sparsity for Federated Learning under System Heterogeneity" (Flado),
CVPR 2023: one activation probability for all channels of a client. Symbols: r_c = the client's share of the full
FLOPs, p = the probability, b = the mask of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.shells import Scale
from fedtailor.errors import require, unknown
from fedtailor.messages import ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.dropping import SCALINGS, Scaling, draw_active, scaled_behind, slowed, started
from fedtailor.methods.registry import register

MEAN = "probability of "  # what a client reports of a group, and the group's name
MEANS, ROUNDS = "mean probabilities", "rounds in the mean"  # what the server remembers of that


@register("uniprob")
@dataclass(frozen=True)
class UniProb(Method):
    """Bernoulli channels, drawn anew for every step; the client holds, receives and returns the full model.

    Only the multiply-accumulates shrink: each step gathers the active channels into a small dense network.
    """

    honours: ClassVar[frozenset[str] | None] = frozenset({"width", "macs"})  # everyone holds the full model
    inactive: ClassVar[Literal["held", "active"]] = "active"  # a channel that was not drawn rests
    scalings: ClassVar[tuple[str, ...]] = SCALINGS

    norm: Policy = "static"
    # Divide outputs of drawn channels by p in training, or multiply by it at the end
    scaling: Scaling = "train"
    slowed_filters: bool = True  # multiply the gradient of a drawn filter by p, as FedDrop's code does
    # p of the start: drawn layers begin with the deviation sqrt(2 p / fan); 0: as built
    sparse_start: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaling not in self.scalings:
            raise unknown("scaling", self.scaling, self.scalings)
        require(0 <= self.sparse_start <= 1, "method.sparse_start", self.sparse_start, "a number from 0 to 1")

    def init(self, model: ElasticModel) -> ServerState:
        """The module's own weights, or the same with the deviations that drawn channels want."""
        state = super().init(model)
        if self.sparse_start == 0:
            return state
        return replace(state, weights=started(state.weights, self.sparse_start, model))

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """Channels have no order: everyone is given the full model, if the budget can be met at all."""
        self.probability(budget, model)
        return Cut.everything()

    def probability(self, budget: Budget, model: ElasticModel) -> float:
        """p: solved from the budget once, not by every client in every round."""
        return model.once(("probability", budget), lambda: uniform_probability(model.costs, budget))

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Solve the budget for p."""
        probability = self.probability(task.client.budget, model)
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
            scale = self.scale(probabilities, cut, weights, model)
            weights = slowed(weights, probabilities, cut, model) if self.slowed_filters else weights
        return model.forward(weights, cut, batch, mode="train", scale=scale)

    def scale(
        self, probabilities: Vector, cut: Cut, weights: Mapping[str, Tensor], model: ElasticModel
    ) -> Scale | None:
        """The factors of the outputs of every layer that makes channels, if training has any."""
        divisors = self.divisors(torch.from_numpy(probabilities), model)
        if divisors is None:
            return None
        slices, even = model.units.slices, dict[str, float]()
        for layer, made in model.groups.producers.items():
            if parts := [divisors[slices[group]] for group in made if group in slices]:
                low, high = min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)
                even[layer] = 1 / low if low == high else 0.0
        if all(even.values()):
            return even  # one number for each layer: no vectors to gather in every step
        like = next(weight for weight in weights.values() if weight.is_floating_point())
        return model.units.on_outputs((1 / divisors).to(like), cut)

    def divisors(self, probabilities: Tensor, model: ElasticModel) -> Tensor | None:
        """What the outputs of drawn units are divided by in training: their probability, or nothing."""
        return probabilities if self.scaling == "train" else None

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Evaluation must know how often a unit was there: only where it is scaled by that, clients say so."""
        update = super().train(task, data, model)
        if self.scaling != "eval":
            return update
        return replace(update, metrics={**update.metrics, **self.means(task, model)})

    def means(self, task: Task, model: ElasticModel) -> dict[str, float]:
        """The mean probability of every group's units, as a client reports it."""
        groups = model.units.by_group(self.probabilities(task, model))
        return {f"{MEAN}{group}": float(each.mean()) for group, each in groups.items()}

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """Plain averaging; with scaling at evaluation also the mean probabilities over all rounds so far."""
        merged = super().merge(state, updates, model)
        if self.scaling != "eval" or not updates:
            return merged
        before, rounds = state.memory.get(MEANS, {}), state.memory.get(ROUNDS, 0)
        total = sum(update.weight for update in updates)
        means = {}
        for group in model.groups.elastic:
            now = sum(update.weight * update.metrics[f"{MEAN}{group}"] for update in updates) / total
            means[group] = (rounds * before.get(group, 0.0) + now) / (rounds + 1)
        return replace(merged, memory={**merged.memory, MEANS: means, ROUNDS: rounds + 1})

    def as_deployed(self, state: ServerState, patch: Patch, model: ElasticModel) -> Patch:
        """With scaling at evaluation, what reads a unit is multiplied by the unit's mean probability in training."""
        means = state.memory.get(MEANS)
        if self.scaling != "eval" or means is None:
            return patch
        shares = [np.full(model.groups.counts[group], means[group]) for group in model.units.slices]
        return scaled_behind(patch, np.concatenate(shares), model)

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """On average exactly what the budget allows."""
        full = super().work(task, model)
        return replace(full, macs=min(full.macs, round(3 * allowed_macs(model.costs, task.client.budget))))
