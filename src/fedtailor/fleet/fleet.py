"""A fleet: tiers of devices, their budgets, and which client belongs to which tier in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError, require
from fedtailor.fleet.devices.equipment import Equipment
from fedtailor.messages import Client
from fedtailor.seeds import Seeds

LONGEST_NAME = 100  # characters of a tier's name
TooSmall = Literal["refuse", "skip"]


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

    ``too_small`` says what becomes of devices that no piece of the model fits: the run is refused, or goes on without
    them. ``without`` makes the fleet that is left; its other clients stay who they are.

    A fleet of a table of devices has ``equipment``: what a simulated clock asks. ``equipped`` gives its tiers budgets.
    """

    tiers: tuple[Tier, ...]
    dynamic: bool = False
    macs_range: tuple[Fraction, Fraction] | None = None
    only_top: bool = False
    too_small: TooSmall = "refuse"
    whole: tuple[Tier, ...] = ()  # with those that no piece fits, where some are left out
    least_macs: Fraction | None = None  # with a range: who has less is left out
    equipment: Equipment | None = None

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        require(len(names) > 0, "fleet.tiers", names, "at least one tier")
        require(len(set(names)) == len(names), "fleet.tiers", names, "different names")
        for tier in self.tiers:
            fine = 0 < len(tier.name) <= LONGEST_NAME and tier.name.isprintable()
            require(
                fine, "name of a tier", tier.name[:200], f"1 to {LONGEST_NAME} letters that can be printed"
            )
            require(tier.share > 0, f"share of tier {tier.name}", tier.share, "a number above 0")

    def capacity(self, num_examples: NDArray[np.int64], round: int, seeds: Seeds) -> Population:
        """All clients with the tiers and budgets that they have in this round."""
        count = len(num_examples)
        if self.macs_range is not None:
            low, high = (float(bound) for bound in self.macs_range)
            draw = seeds.numpy("capacity", round=round if self.dynamic else None)
            shares = np.round(draw.uniform(low, high, size=count), 6)
            able = None if self.least_macs is None else np.flatnonzero(shares >= float(self.least_macs))
            return Population(self, num_examples, self._affordable(shares), shares, able)
        everyone = self.whole or self.tiers
        if self.equipment is not None:
            tiers = self.equipment.tiers(count).astype(np.int64)
        elif self.dynamic and not self.only_top:
            total = sum(tier.share for tier in everyone)
            shares = np.array([float(tier.share / total) for tier in everyone])
            tiers = seeds.numpy("capacity", round=round).choice(
                len(everyone), size=count, p=shares / shares.sum()
            )
        else:
            tiers = np.repeat(np.arange(len(everyone)), self.counted(count))
        if not self.whole:
            return Population(self, num_examples, tiers.astype(np.int32))
        place = {tier.name: number for number, tier in enumerate(self.tiers)}
        own = np.array([place.get(tier.name, -1) for tier in everyone], dtype=np.int32)[tiers]
        return Population(self, num_examples, own, able=np.flatnonzero(own >= 0))

    @property
    def budgets(self) -> list[Budget]:
        """Of its tiers; of a range without its smallest devices also the least that one of its clients may have."""
        least = [] if self.least_macs is None else [Budget(macs=self.least_macs)]
        return [*(tier.budget for tier in self.tiers), *least]

    def equipped(self, budgets: Mapping[str, Budget]) -> Fleet:
        """The fleet with these budgets of its tiers, by name."""
        return replace(self, tiers=tuple(replace(tier, budget=budgets[tier.name]) for tier in self.tiers))

    def without(self, left_out: Sequence[Tier], least_macs: Fraction | None = None) -> Fleet:
        """The fleet without the devices of these tiers, which are counted and take no part."""
        kept = tuple(tier for tier in self.tiers if tier not in left_out)
        return replace(self, tiers=kept, whole=self.tiers, least_macs=least_macs)

    @property
    def left_out(self) -> list[Tier]:
        """The tiers that no piece fits."""
        kept = {tier.name for tier in self.tiers}
        return [tier for tier in self.whole if tier.name not in kept]

    def counts(self, clients: int) -> list[int]:
        """How many clients each tier has: largest remainders, at least one each."""
        counted = dict(
            zip((tier.name for tier in self.whole or self.tiers), self.counted(clients), strict=True)
        )
        return [counted[tier.name] for tier in self.tiers]

    def counted(self, clients: int) -> list[int]:
        """How many clients each tier has, also those that are left out."""
        everyone = self.whole or self.tiers
        if self.only_top:
            return [0] * (len(everyone) - 1) + [clients]
        if self.equipment is not None:
            placed = self.equipment.tiers(clients)
            return [int(count) for count in np.bincount(placed, minlength=len(everyone))]
        if len(everyone) > clients:
            raise FedtailorError(
                f"{clients} client(s) for {len(everyone)} tiers: expected at least one client per tier; "
                f"raise data.clients or choose a fleet with fewer tiers, such as uniform-{max(1, clients)}"
            )
        total = sum(tier.share for tier in everyone)
        exact = [tier.share * clients / total for tier in everyone]
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
    able: NDArray[np.int64] | None = None  # who takes part, where some are left out
    own: Mapping[int, Budget] = field(default_factory=dict)  # budgets that clients brought along

    def __len__(self) -> int:
        return len(self.num_examples) if self.able is None else len(self.able)

    @property
    def left_out(self) -> int:
        """How many clients take no part, because no piece fits them."""
        return len(self.num_examples) - len(self)

    def find(self, client: int) -> Client:
        """The client of this number."""
        if self.able is None:
            require(0 <= client < len(self), "client", client, f"0 to {len(self) - 1}")
            return self[client]
        place = int(np.searchsorted(self.able, client))
        there = place < len(self.able) and int(self.able[place]) == client
        require(there, "client", client, "one that takes part: no piece of the model fits the others")
        return self[place]

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        client = index % len(self) if self.able is None else int(self.able[index])
        tier = self.fleet.tiers[self.tiers[client]]
        budget = tier.budget if self.macs is None else Budget(macs=float(self.macs[client]))
        budget = self.own.get(client, budget)
        return Client(client, tier.name, budget, int(self.num_examples[client]))
