"""Federated averaging: everyone trains the same network.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import meets
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import Client, ServerState
from fedtailor.method import Method
from fedtailor.methods.registry import register


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """One network for all, sample-weighted mean; ``width`` below 1 makes it the smallest device's network."""

    honours: ClassVar[frozenset[str] | None] = None  # everyone trains the same, whatever the budget

    width: WidthLike = 1  # share of every layer's channels, the same for all
    only_able: bool = False  # clients whose budget does not pay for the network take no part

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", as_width(self.width, "method.width"))

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """The same for every budget: FedAvg has no sub-models, so a large device gets no more than a small one."""
        width = as_width(self.width)
        return model.once(("prefix", width, self.grid), lambda: prefix(model.groups, width, self.grid))

    def participants(
        self, state: ServerState, clients: Sequence[Client], model: ElasticModel
    ) -> Sequence[Client]:
        """Everyone, or those who can train the network: what its owner has without sub-models."""
        if not self.only_able:
            return clients
        network = self.cut_for(state, Budget(), model)

        @cache  # clients share few budgets
        def pays(budget: Budget) -> bool:
            wide = budget.width is None or as_width(self.width) <= as_width(budget.width)
            dense = budget.density is None or budget.density == 1
            return wide and dense and meets(model.costs, network, budget, self.workload)

        able = [client for client in clients if pays(client.budget)]
        if not able:
            raise FedtailorError(
                f"method.only_able: no client's budget pays for the network of method.width = {self.width}; "
                "set a smaller width"
            )
        return able
