"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtailor.round import Client
from fedtailor.server.seeds import Seeds


def sample(clients: Sequence[Client], count: int, round: int, seeds: Seeds, retry: int = 0) -> list[Client]:
    """``count`` different clients, fixed by the run's seed and the round alone, in the order of their ids.

    A round that had to be abandoned is tried again with others: ``retry`` counts how often.
    """
    if count >= len(clients):
        chosen = list(clients)
    else:
        generator = seeds.numpy("cohort", round=round, step=retry or None)
        drawn = generator.choice(len(clients), size=count, replace=False)
        chosen = [clients[int(index)] for index in drawn]
    ordered = sorted(chosen, key=lambda client: client.id)
    return [replace(client, slot=slot) for slot, client in enumerate(ordered)]
