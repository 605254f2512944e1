"""How a client's probabilities are kept at its budget and moved along estimates of the slope.

Symbols: r_c = the client's share of the full FLOPs F(1), p_c = its activation probabilities, one per unit, with
F(p_c) = r_c F(1); b ~ Bernoulli(p_c).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.expected import project
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import require, unknown
from fedtailor.messages import Task
from fedtailor.methods.dropping import SCALINGS, Scaling, draw_active
from fedtailor.methods.flado.alignment import DRAWS, PASSES, Alignment, Trajectory
from fedtailor.methods.flado.probabilities import Known, free_of_cost
from fedtailor.methods.uniprob import UniProb

LIVE = ("train", "layer")  # scalings that have a part in training
ESTIMATORS = ("update", *PASSES)
P, STEPS = "probabilities", "steps"  # what a client remembers


@dataclass(frozen=True)
class Aligning(UniProb):
    """UniProb with a probability for every unit of a client, and what moves them."""

    scalings: ClassVar[tuple[str, ...]] = (*SCALINGS, "layer")

    scaling: Scaling = "layer"  # as UniProb's, or divide outputs of drawn units by the mean p of their layer
    # How the slope of the cosine is found
    estimator: Literal["update", "score", "hessian", "surrogate"] = "update"
    alignment_step: float = 0.02  # how far one alignment moves a probability where all estimates agree
    alignment_share: float = 0.01  # passes for estimates, as a share of the local steps; 0: no alignment
    persistence: float = 0.9  # how much of the slope that a client remembers stays when a new one comes in
    smallest_probability: float = 0.1  # p_min: a unit at zero never comes back, one at 0.05 is scaled by 20
    trajectory_memory: float = 0.9  # how much of the trajectory stays when a new update comes in; 0: none
    sketch: int = 16384  # k, the numbers that stand for the trajectory

    def __post_init__(self) -> None:
        super().__post_init__()
        share, step = self.alignment_share, self.alignment_step
        require(0 <= share <= 1, "method.alignment_share", share, "a number from 0 to 1")
        require(0 < step <= 1, "method.alignment_step", step, "above 0 and at most 1")
        least = self.smallest_probability
        require(0 < least <= 1, "method.smallest_probability", least, "above 0 and at most 1")
        for name, kept in (("persistence", self.persistence), ("trajectory_memory", self.trajectory_memory)):
            require(0 <= kept < 1, f"method.{name}", kept, "at least 0 and below 1")
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

    def divisors(self, probabilities: Tensor, model: ElasticModel) -> Tensor | None:
        """With ``layer`` the mean probability of a unit's group: its output keeps its size, and no unit explodes."""
        if self.scaling != "layer":
            return super().divisors(probabilities, model)
        groups = [probabilities[part] for part in model.units.slices.values()]
        return torch.cat([each.mean().expand(len(each)) for each in groups])

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
            divisors = self.divisors(p, model)
            scale = None if divisors is None else model.units.on_outputs((1 / divisors).to(like), cut)
            with task.seeds.scope("alignment layers", client=task.client.id, round=task.round):
                outputs = model.forward(weights, cut, batch, mode="train", scale=scale)
            return self.loss([outputs], [dict(weights)], batch, task, model)

        return Alignment(
            model, task.patch.values, trajectory, loss, self.scaling in LIVE, self.slowed_filters
        )

    def due(self, task: Task) -> tuple[dict[str, Tensor], int]:
        """How many estimates the local steps so far allow; what is left over of a whole one is remembered."""
        steps = self.local.steps_for(task.client.num_examples)
        before = float(task.memory[STEPS]) if STEPS in task.memory else 0.0
        now = before + self.alignment_share * steps
        return {**task.memory, STEPS: torch.tensor(now % 1.0, dtype=torch.float64)}, int(now)
