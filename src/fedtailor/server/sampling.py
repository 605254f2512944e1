"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fedtailor.messages import Client
from fedtailor.seeds import Seeds


def sample(
    clients: Sequence[Client],
    count: int,
    round: int,
    seeds: Seeds,
    *,
    without: Collection[int] = (),
    retry: int = 0,
) -> list[Client]:
    """``count`` different clients, fixed by the run's seed and the round, in the order of their ids.

    Those that rest (``without``) are passed over. A round that had to be abandoned asks others: ``retry`` counts how
    often. Only clients that are drawn are looked at, so that a million of them cost nothing.
    """
    generator = seeds.numpy("cohort", round=round, step=retry or None)
    drawn = count + len(without)  # enough, even if everyone who rests is among them
    if drawn < len(clients):
        picked = (clients[int(index)] for index in generator.choice(len(clients), size=drawn, replace=False))
        chosen = [client for client in picked if client.id not in without][:count]
    else:
        chosen = [client for client in clients if client.id not in without]
        if count < len(chosen):
            chosen = [chosen[int(i)] for i in generator.choice(len(chosen), size=count, replace=False)]
    ordered = sorted(chosen, key=lambda client: client.id)
    return [replace(client, slot=slot) for slot, client in enumerate(ordered)]
