"""An unmodified module that can be cut to any width, trained in pieces and put together again."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import Family, fit
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.elasticity.explain import explain
from fedtailor.elasticity.running.pieces import Pieces


class ElasticModel(Pieces):
    """A module whose pieces can be taken, run and built, what each of them costs, and which one fits a budget."""

    @cached_property
    def costs(self) -> ModelCosts:
        """What its cuts cost: counted when first asked for, and remembered."""
        return ModelCosts(self)

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
