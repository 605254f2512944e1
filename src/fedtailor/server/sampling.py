"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.round import Client
from fedtailor.server.seeds import Seeds


def sample(clients: Sequence[Client], count: int, round: int, seeds: Seeds) -> list[Client]:
    """``count`` different clients, fixed by the run's seed and the round alone, in the order of their ids."""
    if count >= len(clients):
        return sorted(clients, key=lambda client: client.id)
    generator = seeds.numpy("cohort", round=round)
    chosen = generator.choice(len(clients), size=count, replace=False)
    return sorted((clients[int(index)] for index in chosen), key=lambda client: client.id)
