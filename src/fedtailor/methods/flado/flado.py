"""Flado: every client learns which of its channels help it to follow the global trajectory, and trains those more.

Liao, Gao, Zhao, Xu, "Adaptive Channel Sparsity for Federated Learning under System Heterogeneity", CVPR 2023.
Symbols: r_c = the client's share of the full FLOPs F(1), p_c = its activation probabilities, one per unit, with
F(p_c) = r_c F(1); b ~ Bernoulli(p_c); delta = the last global update; J = a fast Johnson-Lindenstrauss transform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.client.sgd import Diverged
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.expected import project
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import require, unknown
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.methods.dropping import draw_active
from fedtailor.methods.flado.alignment import (
    DRAWS,
    PASSES,
    Alignment,
    Trajectory,
)
from fedtailor.methods.flado.following import Following
from fedtailor.methods.flado.overhead import alignment_macs
from fedtailor.methods.flado.probabilities import Known, free_of_cost, tables_of
from fedtailor.methods.flado.trajectory import (
    SKETCH,
    remembering,
    trajectory_of,
    whole_update,
    with_trajectory,
    without_trajectory,
)
from fedtailor.methods.registry import register
from fedtailor.methods.uniprob import UniProb
from fedtailor.seeds import Seeds

ESTIMATORS = ("steps", *PASSES)
P, STEPS = "probabilities", "steps"  # what a client remembers


@register("flado")
@dataclass(frozen=True)
class Flado(UniProb):
    """Bernoulli channels whose probabilities follow the trajectory; without alignment steps this is UniProb.

    The server sends k numbers that stand for its last update, and the seed of the transform that made them. A client
    adjusts its probabilities at their budget, keeps them for the next time, and trains as UniProb does.
    """

    estimator: Literal["steps", "score", "hessian", "surrogate"] = "steps"
    alignment_step: float = 0.02  # how far one alignment moves a probability on whose slope all estimates agree
    alignment_share: float = 0.01  # passes for estimates, as a share of the local steps; 0: no alignment
    persistence: float = 0.9  # how much of the slope that a client remembers stays when a new one comes in
    smallest_probability: float = 0.1  # p_min: a unit at zero never comes back, one at 0.05 is scaled by 20
    sketch: int = 1024  # k, the numbers that stand for the global update

    def __post_init__(self) -> None:
        super().__post_init__()
        share, step = self.alignment_share, self.alignment_step
        require(0 <= share <= 1, "method.alignment_share", share, "a number from 0 to 1")
        require(0 < step <= 1, "method.alignment_step", step, "above 0 and at most 1")
        least, kept = self.smallest_probability, self.persistence
        require(0 < least <= 1, "method.smallest_probability", least, "above 0 and at most 1")
        require(0 <= kept < 1, "method.persistence", kept, "at least 0 and below 1")
        require(self.sketch >= 1, "method.sketch", self.sketch, "at least 1")
        if self.estimator not in ESTIMATORS:
            raise unknown("estimator", self.estimator, ESTIMATORS)

    def uniform(self, budget: Budget, model: ElasticModel) -> Vector:
        """p_c at the start: the same for all units, at the budget's cost."""
        return np.full(model.units.total, self.probability(budget, model))

    def floor(self, budget: Budget, model: ElasticModel) -> float:
        """The least that a probability falls to: the smallest budgets still leave their clients a choice."""
        return min(self.smallest_probability, self.probability(budget, model) / 2)

    def at_budget(self, probabilities: Vector, budget: Budget, model: ElasticModel) -> Vector:
        """The nearest multiple that meets the budget exactly."""
        return project(model.costs, probabilities, budget, self.floor(budget, model))

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The full model and the sketch of the last update, with its seed: only k numbers more."""
        task = super().assign(state, client, model, seeds)
        return task if self.alignment_share == 0 else with_trajectory(task, state)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """Plain averaging; then the update is sketched by the transform whose seed is this round's number."""
        merged = super().merge(state, updates, model)
        return merged if self.alignment_share == 0 else remembering(merged, state, self.sketch, model)

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Take up the probabilities of the last time; where there is a trajectory, align them or watch the steps."""
        budget, kept = task.client.budget, task.memory.get(P)
        known = kept is not None and kept.shape == (model.units.total,)
        p = self.at_budget(kept.numpy(), budget, model) if known else self.uniform(budget, model)  # type: ignore[union-attr]
        patch, follows = without_trajectory(task.patch), SKETCH in task.patch.values
        memory = {**(task.memory if known else {}), P: torch.from_numpy(p)}
        prepared: dict[str, Any] = {"uniform": not follows and not task.memory}
        ready = replace(task, patch=patch, memory=memory, prepared=prepared)
        if not follows or (p == 1).all():
            return ready
        trajectory = trajectory_of(task.patch, model)
        if self.estimator != "steps":
            return self.aligned(ready, trajectory, data, model)
        prepared["following"] = Following(whole_update(trajectory, patch, model), model)
        return ready

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        following = task.prepared.get("following")
        watched = weights if following is None else following.watched(dict(weights), cut)
        return super().forward(watched, cut, batch, task, model)

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Training that leaves the numbers is done again from uniform probabilities, once; both attempts count."""
        again = dict[str, float]()
        try:
            update = super().train(task, data, model)
        except Diverged:
            if task.prepared["uniform"]:
                raise
            task = self.prepare(replace(task, memory={}), data, model)
            update = super().train(task, data, model)
            again = {"examples": 2 * update.metrics["examples"], "reset": 1.0}
        following = task.prepared.get("following")
        memory, cosine = update.memory, task.prepared.get("cosine")
        if following is not None:
            slope = following.slope(self.probabilities(task, model), self.power)
            memory, cosine = self.moved(memory, slope, task.client.budget, model), following.cosine
        again |= {} if cosine is None else {"cosine": cosine}
        return replace(update, metrics={**update.metrics, **self.means(task, model), **again}, memory=memory)

    @property
    def power(self) -> int:
        """A drawn filter's step grows as this power of its p."""
        return int(self.slowed_filters) - int(self.scaling == "train")

    def aligned(self, task: Task, trajectory: Trajectory, data: Examples, model: ElasticModel) -> Task:
        """Estimates with passes of their own, as many as are due, and a step of p after each of them."""
        where = {"client": task.client.id, "round": task.round}
        order, cosine = task.seeds.torch("alignment batches", **where), None
        memory, due = self.due(task)
        for step in range(due):
            chosen = torch.randperm(len(data), generator=order)[: self.local.batch_size]
            p = memory[P].numpy()
            chances = [task.seeds.numpy(f"alignment draw {n}", **where, step=step) for n in range(DRAWS)]
            cuts = [draw_active(model.groups, model.units.by_group(p), chance) for chance in chances]
            client = self.alignment(task, data.take(chosen), trajectory, model)
            slope, cosine = client.estimate(self.estimator, p, cuts)
            if not np.isfinite(slope).all() or not math.isfinite(cosine):
                return replace(task, memory={P: torch.from_numpy(self.uniform(task.client.budget, model))})
            memory = self.moved(memory, slope, task.client.budget, model)
        return replace(task, memory=memory, prepared={**task.prepared, "cosine": cosine})

    def alignment(self, task: Task, batch: Batch, trajectory: Trajectory, model: ElasticModel) -> Alignment:
        """The client's loss on a batch, as its steps see it: a function of weights and of all probabilities."""

        def loss(weights: Mapping[str, Tensor], cut: Cut, p: Tensor) -> Tensor:
            like = next(weight for weight in weights.values() if weight.is_floating_point())
            scale = model.units.on_outputs((1 / p).to(like), cut) if self.scaling == "train" else None
            with task.seeds.scope("alignment layers", client=task.client.id, round=task.round):
                outputs = model.forward(weights, cut, batch, mode="train", scale=scale)
            return self.loss([outputs], [dict(weights)], batch, task, model)

        return Alignment(
            model, task.patch.values, trajectory, loss, self.scaling == "train", self.slowed_filters
        )

    def due(self, task: Task) -> tuple[dict[str, Tensor], int]:
        """How many estimates the local steps so far allow; what is left over of a whole one is remembered."""
        steps = self.local.steps_for(task.client.num_examples)
        before = float(task.memory[STEPS]) if STEPS in task.memory else 0.0
        now = before + self.alignment_share * steps
        return {**task.memory, STEPS: torch.tensor(now % 1.0, dtype=torch.float64)}, int(now)

    def moved(
        self, memory: dict[str, Tensor], slope: Vector, budget: Budget, model: ElasticModel
    ) -> dict[str, Tensor]:
        """What a client remembers after a new estimate: the slopes, and probabilities one step further along them."""
        p = memory[P].numpy()
        fresh = free_of_cost(slope, p, model)
        known = Known.of(memory, model.units.total).joined(fresh, self.persistence)
        along = free_of_cost(known.direction(self.persistence), p, model)
        further = np.clip(p + self.alignment_step * along, self.floor(budget, model), 1)
        return {**memory, **known.memory, P: torch.from_numpy(self.at_budget(further, budget, model))}

    def probabilities(self, task: Task, model: ElasticModel) -> Vector:
        return np.asarray(task.memory[P].numpy())

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """UniProb's steps, and alignment spread over the examples of the round."""
        local = super().work(task, model)
        if SKETCH not in task.patch.values:
            return local
        padded, client = trajectory_of(task.patch, model).transform.padded, task.client
        extra = alignment_macs(self.estimator, self.alignment_share, self.local, client, padded, model)
        return replace(local, macs=local.macs + round(extra))

    def diagnostics(
        self, state: ServerState, model: ElasticModel, kept: Mapping[int, Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """For every group the probabilities of its units (columns) at every client (rows), and who these are."""
        return tables_of({client: memory[P] for client, memory in kept.items() if P in memory}, model)
