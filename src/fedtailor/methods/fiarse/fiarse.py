"""FIARSE: every device trains the part of the model whose weights are largest, and the threshold bends its gradient.

Wu, Wang, Wang, Liu, Su, Gao, "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction",
NeurIPS 2024. Symbols: gamma = the share that a device keeps, theta = the smallest magnitude among it, M = 1 where
|x| >= theta. A client minimises F(x * M(x)) with the slope of M taken as 2 theta / (|x| + theta)^2 where it is 1, so
that x has the gradient g * M * (1 + 2 theta |x| / (|x| + theta)^2), g being that of x * M(x).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import CHANNEL_LIMITS, check_honoured
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require
from fedtailor.messages import Client, ServerState, Task
from fedtailor.method import Method
from fedtailor.methods.fiarse.magnitude import (
    density_for,
    gate,
    importance,
    mask_of,
    strongest,
    unit_thresholds,
    weight_thresholds,
)
from fedtailor.methods.masks import mask_factors
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

GRANULARITIES = ("weights", "channels")
WEIGHT_LIMITS = frozenset({"width", "params", "density"})  # what leaving out single weights can keep to


@register("fiarse")
@dataclass(frozen=True)
class FIARSE(Method):
    """Pieces by magnitude, chosen anew in every round; single weights as in the paper, or whole channels."""

    policies: ClassVar[tuple[Policy, ...]] = (
        "averaged",
        "static",
    )  # a choice of units has no width of its own
    honours: ClassVar[frozenset[str] | None] = CHANNEL_LIMITS | WEIGHT_LIMITS

    norm: Policy = "static"
    weighting: Literal["samples", "count"] = "count"
    granularity: Literal["weights", "channels"] = "weights"  # what is kept or left out
    layerwise: bool = False  # weights: rank every tensor by itself instead of all together
    biased_gradient: bool = True  # bend the gradient by the threshold; false: that of the kept weights alone

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.granularity in GRANULARITIES,
            "method.granularity",
            self.granularity,
            " or ".join(GRANULARITIES),
        )

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """The largest magnitudes of the state's weights, as many as the budget pays for; ranked once for a budget."""
        return state.once(self, budget, lambda: self._ranked(state, budget, model))

    def _ranked(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        if self.granularity == "channels":
            return strongest(state.weights, super().cut_for(state, budget, model), model)
        check_honoured(budget, WEIGHT_LIMITS, f'{self.name} with granularity = "weights"')
        density = density_for(budget, model)
        if density == 1:
            return Cut.everything()
        mask = mask_of(state.weights, density, model, layerwise=self.layerwise)
        return Cut(tag=str(density), mask=mask)

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The kept values, and which these are: magnitudes move, so the map of single weights is new in every round."""
        task = super().assign(state, client, model, seeds)
        mask = task.lease.cut.sparse
        return task if mask is None else replace(task, levels=mask.levels)

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """theta for this round, from the values that came: it stays, while magnitudes move."""
        cut, values = task.lease.cut, task.patch.values
        if cut.sparse is not None:
            thresholds = weight_thresholds(values, cut.sparse, layerwise=self.layerwise)
            prepared = {"masks": mask_factors([cut], model), "thresholds": thresholds}
            return replace(task, patch=model.spread(task.patch), prepared=prepared)
        if cut.channels and self.biased_gradient:
            scores = importance(values, cut, model)
            return replace(task, prepared={"thresholds": unit_thresholds(scores, cut, model)})
        return task

    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any:
        if "masks" in task.prepared:
            weights = {**weights, **self._kept_weights(weights, task)}
        elif "thresholds" in task.prepared:
            passed = gate(importance(weights, cut, model), task.prepared["thresholds"])
            # A held channel stays in the network until the round ends: only the slope of its gate acts.
            weights = model.units.gated(weights, 1 + passed - passed.detach(), cut)
        return model.forward(weights, cut, batch, mode="train")

    def _kept_weights(self, weights: Weights, task: Task) -> Weights:
        """x * M(x): zeros outside the mask, and where a magnitude has fallen below the threshold."""
        masks, thresholds = task.prepared["masks"], task.prepared["thresholds"]
        kept = {}
        for name, threshold in thresholds.items():
            passed = gate(weights[name].abs(), threshold)
            passed = passed if self.biased_gradient else passed.detach()
            kept[name] = weights[name] * (passed * masks[tagged(name, task.lease.cut.tag)])
        return kept
