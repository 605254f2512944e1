"""Flado: every client learns which of its channels help it to follow the global trajectory, and trains those more.

Liao, Gao, Zhao, Xu, "Adaptive Channel Sparsity for Federated Learning under System Heterogeneity", CVPR 2023.
Symbols: r_c = the client's share of the full FLOPs F(1), p_c = its activation probabilities, one per unit, with
F(p_c) = r_c F(1); b ~ Bernoulli(p_c); delta = the last global update; J = a fast Johnson-Lindenstrauss transform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.client.local_steps import Diverged
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.methods.flado.aligning import Aligning, P
from fedtailor.methods.flado.following import followed
from fedtailor.methods.flado.overhead import alignment_macs
from fedtailor.methods.flado.probabilities import tables_of
from fedtailor.methods.flado.trajectory import (
    SKETCH,
    remembering,
    trajectory_of,
    whole_update,
    with_trajectory,
    without_trajectory,
)
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds


@register("flado")
@dataclass(frozen=True)
class Flado(Aligning):
    """Bernoulli channels whose probabilities follow the trajectory; without alignment steps this is UniProb.

    The server sends k numbers that stand for where it has been going, and the seed of their transform. A client
    adjusts its probabilities at their budget, keeps them for the next time, and trains as UniProb does.
    """

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The full model and the sketch of the trajectory, with its seed: only k numbers more."""
        task = super().assign(state, client, model, seeds)
        return task if self.alignment_share == 0 else with_trajectory(task, state)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """Plain averaging; then the update is sketched by the transform whose seed is this round's number."""
        merged = super().merge(state, updates, model)
        if self.alignment_share == 0:
            return merged
        return remembering(merged, state, self.sketch, self.trajectory_memory, model)

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Take up the probabilities of the last time; with a trajectory, align them or wait for the update."""
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
        if self.estimator != "update":
            return self.aligned(ready, trajectory, data, model)
        prepared["trajectory"] = trajectory
        return ready

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
        memory, cosine = update.memory, task.prepared.get("cosine")
        if trajectory := task.prepared.get("trajectory"):
            toward, length = whole_update(trajectory, task.patch, model), float(trajectory.sketch.norm())
            slope, cosine = followed(
                task.patch.values, update.patch.values, toward, length,
                self.probabilities(task, model), self.local.steps_for(len(data)), self.power, model,
            )  # fmt: skip
            memory = self.moved(memory, slope, task.client.budget, model)
        again |= {} if cosine is None else {"cosine": cosine}
        return replace(update, metrics={**update.metrics, **self.means(task, model), **again}, memory=memory)

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
