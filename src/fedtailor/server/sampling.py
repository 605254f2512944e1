"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

import numpy as np

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
    there: Callable[[Client], bool] | None = None,
) -> list[Client]:
    """``count`` different clients, fixed by the run's seed and the round, in the order of their ids.

    Those that rest (``without``) are passed over. A round that had to be abandoned asks others: ``retry`` counts how
    often. Only clients that are drawn are looked at, so that a million of them cost nothing; where devices come and go,
    ``there`` says of each whether it can be asked.
    """
    generator = seeds.numpy("cohort", round=round, step=retry or None)
    if there is not None:
        return _in_order(_drawn(clients, count, generator, lambda c: c.id not in without and there(c)))
    drawn = count + len(without)  # enough, even if everyone who rests is among them
    if drawn < len(clients):
        picked = (clients[int(index)] for index in generator.choice(len(clients), size=drawn, replace=False))
        chosen = [client for client in picked if client.id not in without][:count]
    else:
        chosen = [client for client in clients if client.id not in without]
        if count < len(chosen):
            chosen = [chosen[int(i)] for i in generator.choice(len(chosen), size=count, replace=False)]
    return _in_order(chosen)


def _in_order(chosen: Sequence[Client]) -> list[Client]:
    ordered = sorted(chosen, key=lambda client: client.id)
    return [client.in_slot(slot) for slot, client in enumerate(ordered)]


def _drawn(
    clients: Sequence[Client], count: int, generator: np.random.Generator, can: Callable[[Client], bool]
) -> list[Client]:
    """The first ``count`` that can, of more and more that are drawn: few are looked at where many can."""
    drawn = min(len(clients), count)
    while True:
        picked = generator.choice(len(clients), size=drawn, replace=False) if drawn < len(clients) else None
        order = generator.permutation(len(clients)) if picked is None else picked
        found = list(islice((each for each in (clients[int(i)] for i in order) if can(each)), count))
        if len(found) == count or drawn == len(clients):
            return found
        drawn = min(len(clients), 4 * drawn)


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
