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
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.expected import allowed_macs, project, uniform_probability
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import require, unknown
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.methods.dropping import draw_active
from fedtailor.methods.flado.alignment import (
    ESTIMATORS,
    Alignment,
    Trajectory,
    estimate_macs,
    sketched,
    trained_names,
)
from fedtailor.methods.flado.trajectory import SEED, SKETCH, trajectory_of, without_trajectory
from fedtailor.methods.registry import register
from fedtailor.methods.uniprob import UniProb
from fedtailor.seeds import Seeds


@register("flado")
@dataclass(frozen=True)
class Flado(UniProb):
    """Bernoulli channels whose probabilities follow the trajectory; without alignment steps this is UniProb.

    The server sends k numbers that stand for its last update, and the seed of the transform that made them. A client
    adjusts its probabilities at their budget, keeps them for the next time, and trains as UniProb does.
    """

    alignment_share: float = 0.01  # alignment steps as a share of the local steps, at least one; 0: none
    alignment_step: float = 0.05  # the largest change of a probability in one alignment step
    estimator: Literal["hessian", "score", "surrogate"] = "hessian"
    alignment_network: Literal["drawn", "full"] = "drawn"  # what alignment passes run on
    smallest_probability: float = 0.01  # p_min: a unit at zero would never come back
    sketch: int = 1024  # k, the numbers that stand for the global update

    def __post_init__(self) -> None:
        super().__post_init__()
        share, step = self.alignment_share, self.alignment_step
        require(0 <= share <= 1, "method.alignment_share", share, "a number from 0 to 1")
        require(0 < step <= 1, "method.alignment_step", step, "above 0 and at most 1")
        least = self.smallest_probability
        require(0 < least <= 1, "method.smallest_probability", least, "above 0 and at most 1")
        require(self.sketch >= 1, "method.sketch", self.sketch, "at least 1")
        if self.estimator not in ESTIMATORS:
            raise unknown("estimator", self.estimator, ESTIMATORS)
        if self.alignment_network not in ("drawn", "full"):
            raise unknown("alignment network", self.alignment_network, ("drawn", "full"))

    # On the server

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        self.uniform(budget, model)
        return Cut.everything()

    def uniform(self, budget: Budget, model: ElasticModel) -> Vector:
        """p_c at the start: the same for all units, at the budget's cost."""
        start = np.full(model.units.total, uniform_probability(model.costs, budget))
        return (
            start
            if start.min(initial=1) >= self.smallest_probability
            else self.at_budget(start, budget, model)
        )

    def at_budget(self, probabilities: Vector, budget: Budget, model: ElasticModel) -> Vector:
        """The nearest multiple that meets the budget exactly."""
        return project(model.costs, probabilities, budget, self.smallest_probability)

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The full model and the sketch of the last update, with its seed: only k numbers more."""
        task = super().assign(state, client, model, seeds)
        if SKETCH not in state.memory or self.alignment_share == 0:
            return task
        seed = torch.tensor(state.memory[SEED], dtype=torch.int64)
        values = {**task.patch.values, SKETCH: state.memory[SKETCH], SEED: seed}
        return replace(task, patch=Patch(values, task.patch.cut))

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """Plain averaging; then the update is sketched by the transform whose seed is this round's number."""
        merged = super().merge(state, updates, model)
        if self.alignment_share == 0:
            return merged
        names = trained_names(model)
        moved = {name: merged.weights[name] - state.weights[name] for name in names}
        if not any(bool(value.any()) for value in moved.values()):
            return merged  # nobody answered: the last direction still stands
        seed = state.round + 1
        sketch = sketched(names, moved, self.sketch, seed).sketch.float()
        return replace(merged, memory={**merged.memory, SKETCH: sketch, SEED: seed})

    # On the client

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Training that leaves the numbers is done again from uniform probabilities, once; both attempts count."""
        again: dict[str, float] = {}
        try:
            update = super().train(task, data, model)
        except Diverged:
            if task.prepared["uniform"]:
                raise
            task = self.prepare(replace(task, memory={}), data, model)
            update = super().train(task, data, model)
            again = {"examples": 2 * update.metrics["examples"], "reset": 1.0}
        cosine = {name: value for name, value in task.prepared.items() if name == "cosine"}
        return replace(update, metrics={**update.metrics, **self.means(task, model), **cosine, **again})

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Take up the probabilities of the last time, and align them if there is a trajectory to follow."""
        budget, kept = task.client.budget, task.memory.get("probabilities")
        known = kept is not None and kept.shape == (model.units.total,)
        p = self.at_budget(kept.numpy(), budget, model) if known else self.uniform(budget, model)  # type: ignore[union-attr]
        patch, follows = without_trajectory(task.patch), SKETCH in task.patch.values
        prepared: dict[str, Any] = {"uniform": not follows and not task.memory}
        if follows and not (p == 1).all():
            trajectory = trajectory_of(task.patch, model)
            p, prepared["cosine"] = self.aligned(p, replace(task, patch=patch), trajectory, data, model)
        return replace(task, patch=patch, memory={"probabilities": torch.from_numpy(p)}, prepared=prepared)

    def aligned(
        self, p: Vector, task: Task, trajectory: Trajectory, data: Examples, model: ElasticModel
    ) -> tuple[Vector, float]:
        """Steps of p towards a larger cosine, each brought back to the budget; and the last cosine before its step."""
        order = task.seeds.torch("alignment batches", client=task.client.id, round=task.round)
        cosine = 0.0
        for step in range(self.alignment_steps(task)):
            chosen = torch.randperm(len(data), generator=order)[: self.local.batch_size]
            batch = data.take(chosen)

            def loss(weights: Mapping[str, Tensor], cut: Cut, batch: Any = batch, p: Vector = p) -> Tensor:
                scale = self.scale(p, cut, weights, model) if self.scaling == "train" else None
                with task.seeds.scope("alignment layers", client=task.client.id, round=task.round):
                    outputs = model.forward(weights, cut, batch, mode="train", scale=scale)
                return self.loss([outputs], [dict(weights)], batch, task, model)

            def draw(number: int, step: int = step, p: Vector = p) -> Cut:
                purpose = f"alignment draw {number}"
                chance = task.seeds.numpy(purpose, client=task.client.id, round=task.round, step=step)
                return draw_active(model.groups, model.units.by_group(p), chance)

            client = Alignment(model, task.patch.values, trajectory, loss)
            whole = self.alignment_network == "full"
            gradient, cosine = client.estimate(self.estimator, p, draw, whole)
            if not np.isfinite(gradient).all() or not math.isfinite(cosine):
                return self.uniform(task.client.budget, model), 0.0
            p = self.moved(p, gradient, task.client.budget, model)
        return p, cosine

    def moved(self, p: Vector, gradient: Vector, budget: Budget, model: ElasticModel) -> Vector:
        """One normalised step uphill, brought back to the budget."""
        steepest = float(np.abs(gradient).max(initial=0))
        if steepest == 0:
            return p
        moved = p + self.alignment_step * gradient / steepest
        return self.at_budget(np.clip(moved, self.smallest_probability, 1), budget, model)

    def alignment_steps(self, task: Task) -> int:
        """At most a share of the local steps, at least one where there is a share at all."""
        if self.alignment_share == 0:
            return 0
        return max(1, int(self.alignment_share * self.local.steps_for(task.client.num_examples)))

    def probabilities(self, task: Task, model: ElasticModel) -> Vector:
        return np.asarray(task.memory["probabilities"].numpy())

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """UniProb's steps, and the alignment spread over the examples of the round."""
        local = super().work(task, model)
        if SKETCH not in task.patch.values:
            return local
        full = float(model.cost(Cut.everything()).macs)
        dense = self.alignment_network == "full" and self.estimator != "score"
        network = full if dense else min(full, allowed_macs(model.costs, task.client.budget))
        batch = min(self.local.batch_size, task.client.num_examples)
        size = trajectory_of(task.patch, model).transform.padded
        once = estimate_macs(self.estimator, network * batch, size)
        trained = self.local.examples_for(task.client.num_examples)
        return replace(local, macs=local.macs + round(self.alignment_steps(task) * once / trained))
