"""A fleet: tiers of devices, their budgets, and which client belongs to which tier in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

import numpy as np
from numpy.typing import NDArray

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Client
from fedtailor.seeds import Seeds


@dataclass(frozen=True)
class Tier:
    """A class of devices."""

    name: str
    budget: Budget
    share: Fraction  # of all clients


@dataclass(frozen=True)
class Fleet:
    """Tiers from the smallest to the largest device.

    ``dynamic`` redraws every client's tier in every round from the shares. ``macs_range`` gives every client a budget
    of its own, uniform in a range of shares of the full model's multiply-accumulates; the tiers then are the
    points at which the result is evaluated, and a client belongs to the largest tier that it can afford. With
    ``only_top`` every client belongs to the largest tier, and the others are only evaluated.
    """

    tiers: tuple[Tier, ...]
    dynamic: bool = False
    macs_range: tuple[Fraction, Fraction] | None = None
    only_top: bool = False

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        require(len(names) > 0, "fleet.tiers", names, "at least one tier")
        require(len(set(names)) == len(names), "fleet.tiers", names, "different names")
        for tier in self.tiers:
            require(tier.share > 0, f"share of tier {tier.name}", tier.share, "a number above 0")

    def capacity(self, num_examples: NDArray[np.int64], round: int, seeds: Seeds) -> Population:
        """All clients with the tiers and budgets that they have in this round."""
        count = len(num_examples)
        if self.macs_range is not None:
            low, high = (float(bound) for bound in self.macs_range)
            draw = seeds.numpy("capacity", round=round if self.dynamic else None)
            shares = np.round(draw.uniform(low, high, size=count), 6)
            return Population(self, num_examples, self._affordable(shares), shares)
        if self.dynamic and not self.only_top:
            total = sum(tier.share for tier in self.tiers)
            shares = np.array([float(tier.share / total) for tier in self.tiers])
            tiers = seeds.numpy("capacity", round=round).choice(
                len(self.tiers), size=count, p=shares / shares.sum()
            )
        else:
            tiers = np.repeat(np.arange(len(self.tiers)), self.counts(count))
        return Population(self, num_examples, tiers.astype(np.int32))

    def counts(self, clients: int) -> list[int]:
        """How many clients each tier has: largest remainders, at least one each."""
        if self.only_top:
            return [0] * (len(self.tiers) - 1) + [clients]
        if len(self.tiers) > clients:
            raise FedtailorError(
                f"{clients} client(s) for {len(self.tiers)} tiers: expected at least one client per tier; "
                "raise data.clients or choose a fleet with fewer tiers"
            )
        total = sum(tier.share for tier in self.tiers)
        exact = [tier.share * clients / total for tier in self.tiers]
        counts = [max(1, int(share)) for share in exact]
        order = sorted(range(len(exact)), key=lambda tier: counts[tier] - exact[tier])
        while sum(counts) < clients:
            counts[order[0]] += 1
            order = sorted(range(len(exact)), key=lambda tier: counts[tier] - exact[tier])
        while sum(counts) > clients:  # only when a rare tier was rounded up to one client
            counts[int(np.argmax(counts))] -= 1
        return counts

    def _affordable(self, shares: NDArray[np.float64]) -> NDArray[np.int32]:
        edges = np.array([float(Fraction(tier.budget.macs or 0)) for tier in self.tiers])
        return np.clip(np.searchsorted(edges, shares, side="right") - 1, 0, None).astype(np.int32)


@dataclass(frozen=True)
class Population(Sequence[Client]):
    """All clients of one round; a ``Client`` object is made when it is asked for, so a million of them is cheap."""

    fleet: Fleet
    num_examples: NDArray[np.int64]
    tiers: NDArray[np.int32]  # index of each client's tier
    macs: NDArray[np.float64] | None = None  # each client's own limit, where the fleet has a range

    def __len__(self) -> int:
        return len(self.num_examples)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        client = index % len(self)
        tier = self.fleet.tiers[self.tiers[client]]
        budget = tier.budget if self.macs is None else Budget(macs=float(self.macs[client]))
        return Client(client, tier.name, budget, int(self.num_examples[client]))
