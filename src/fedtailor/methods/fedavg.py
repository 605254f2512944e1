"""Federated averaging: everyone trains the same network.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import ServerState
from fedtailor.method import Method
from fedtailor.methods.registry import register


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """One network for all, sample-weighted mean; ``width`` below 1 makes it the smallest device's network."""

    honours: ClassVar[frozenset[str] | None] = None  # everyone trains the same, whatever the budget

    width: WidthLike = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", as_width(self.width, "method.width"))

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """The same for every budget: FedAvg has no sub-models, so a large device gets no more than a small one."""
        return prefix(model.groups, as_width(self.width), self.align)
