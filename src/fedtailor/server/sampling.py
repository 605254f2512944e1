"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fedtailor.elasticity.costing.budget import Budget
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


BUDGETS_LOOKED_AT = 10  # times the clients that are wanted: what a budget allows takes a moment to find out


def sample_able(
    clients: Sequence[Client], count: int, round: int, seeds: Seeds, can: Callable[[Budget], bool]
) -> list[Client]:
    """At most ``count`` clients (0: all) that have something to measure on and ``can`` by their budgets.

    Fixed by the run's seed and the round. Where there are no more clients than wanted, all are looked at.
    """
    few = not count or len(clients) <= count
    order = range(len(clients)) if few else seeds.numpy("measuring", round=round).permutation(len(clients))
    known: dict[Budget, bool] = {}
    found: list[Client] = []
    for index in order:
        client = clients[int(index)]
        if client.num_examples <= 1:
            continue
        if client.budget not in known:
            if not few and len(known) >= BUDGETS_LOOKED_AT * count:
                continue
            known[client.budget] = can(client.budget)
        if known[client.budget]:
            found.append(client)
            if len(found) == count:
                break
    return sorted(found, key=lambda client: client.id)


def sample_of_tiers(clients: Sequence[Client], count: int, round: int, seeds: Seeds) -> Sequence[Client]:
    """At most ``count`` clients of every tier (0: all), fixed by the run's seed and the round."""
    if not count or len(clients) <= count:
        return clients
    taken: dict[str, list[Client]] = {}
    for index in seeds.numpy("measuring", round=round).permutation(len(clients)):
        client = clients[int(index)]
        of_tier = taken.setdefault(client.tier, [])
        if len(of_tier) < count:
            of_tier.append(client)
    return sorted((client for each in taken.values() for client in each), key=lambda client: client.id)
