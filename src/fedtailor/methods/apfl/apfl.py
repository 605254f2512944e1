"""APFL, architecture personalisation: FedCS finds every client's layer widths, FedPA trains the networks found.

Luo, Chen, Li, Feng, "Architecture Personalization in Resource-constrained Federated Learning", NeurIPS workshop 2021.
Not to be confused with "Adaptive Personalized Federated Learning", which has the same initials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.methods.apfl.fedcs import FedCS
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds


@register("apfl")
@dataclass(frozen=True)
class APFL(FedCS):
    """Warm-up, search and FedPA in one run: the rounds that the first two leave are FedPA's."""

    inherit: bool = False  # FedPA goes on from the warm-up's weights instead of new ones

    def trainers(self, clients: Sequence[Client]) -> Sequence[Client]:
        return clients

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        return super().assign(self.renewed(state, model, client.id), client, model, seeds)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        clients = [update.client for update in updates]
        start = self.renewed(state, model, *clients) if clients else state
        return super().merge(start, updates, model)

    def renewed(self, state: ServerState, model: ElasticModel, *clients: int) -> ServerState:
        """In FedPA's first round, the state with the weights that it starts from: those of the module."""
        memory = state.memory
        trained = memory["stage"] == "fedpa"
        searched = memory["over"] or all(client in memory["architectures"] for client in clients)
        if self.inherit or trained or self.warming(state) or not searched:
            return state
        return replace(state, weights=model.weights(), moments={})
