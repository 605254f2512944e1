"""An unmodified module that can be cut to any width, trained in pieces and put together again."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedtailor.data.batches import target_of
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import Family, fit
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import Chain, Exit
from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.elasticity.explain import explain
from fedtailor.elasticity.running.exits import exits_of
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.elasticity.running.shortening import chains_of
from fedtailor.objective.tasks import LearningTask, told_by_shapes


class ElasticModel(Pieces):
    """A module whose pieces can be taken, run and built, what each of them costs, and which one fits a budget."""

    @cached_property
    def costs(self) -> ModelCosts:
        """What its cuts cost: counted when first asked for, and remembered."""
        return ModelCosts(self)

    @cached_property
    def output(self) -> Any:
        """What the module answers to the example."""
        with torch.no_grad():
            return self.forward(self.weights(), Cut.everything(), self.example)

    @cached_property
    def learning_task(self) -> LearningTask:
        """What outputs and targets mean: as the objective says, or else as their shapes tell."""
        return self.objective.task or told_by_shapes(self.output, target_of(self.example))

    @property
    def exits(self) -> tuple[Exit, ...]:
        """Where its networks may end, the deepest last: one place, unless it was made with exits."""
        return exits_of(self.module)

    @property
    def chains(self) -> tuple[Chain, ...]:
        """Its blocks, container by container, and which of them a piece may leave out."""
        return chains_of(self)

    def cost(self, cut: Cut, workload: Workload | None = None) -> Cost:
        """Parameters, multiply-accumulates per example and bytes of a cut; with a workload, also training memory."""
        return self.costs.of(cut, workload)

    def fit(
        self, budget: Budget, align: int = 1, *, family: Family = "uniform", workload: Workload | None = None
    ) -> Cut:
        """The largest cut that a budget allows; see ``costing.fitting.fit``."""
        return fit(self.costs, budget, align, family=family, workload=workload)

    def submodel(self, budget: Budget | WidthLike) -> nn.Module:
        """A plain small module with the module's own values: ``submodel(0.5)``, ``submodel(Budget(macs="5M"))``.

        Nothing is trained or calibrated: it is the piece that a device would start from.
        """
        wanted = budget if isinstance(budget, Budget) else Budget(width=as_width(budget))
        return self.extract(self.weights(), self.fit(wanted))

    def explain(self) -> str:
        """A report for people: what can shrink, what cannot and why, and how much of the model that is."""
        return explain(self.costs)
