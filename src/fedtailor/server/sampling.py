"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtailor.round import Client
from fedtailor.server.seeds import Seeds


def sample(clients: Sequence[Client], count: int, round: int, seeds: Seeds) -> list[Client]:
    """``count`` different clients, fixed by the run's seed and the round alone, in the order of their ids."""
    if count >= len(clients):
        chosen = list(clients)
    else:
        drawn = seeds.numpy("cohort", round=round).choice(len(clients), size=count, replace=False)
        chosen = [clients[int(index)] for index in drawn]
    ordered = sorted(chosen, key=lambda client: client.id)
    return [replace(client, slot=slot) for slot, client in enumerate(ordered)]
