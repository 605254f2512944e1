"""An attack: which clients are bad, and what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.server.setup import Setup

# What the factor multiplies, and what it is where nothing is said: the client's own step, its negative, noise of the
# step's size; the step of a client that was trained on poisoned examples.
FACTORS = {
    "nan": 1.0,
    "scale": 100.0,
    "sign-flip": 5.0,
    "noise": 10.0,
    "label-flip": 1.0,
    "backdoor": 1.0,
    "absent": 1.0,
}
KINDS = tuple(kind for kind in FACTORS if kind != "absent")
Kind = Literal["nan", "scale", "sign-flip", "noise", "label-flip", "backdoor", "absent"]
POISONED = ("label-flip", "backdoor")  # they train on other examples, and send what comes of it


@dataclass(frozen=True)
class Attack:
    """A share of the clients, of all tiers or of one, that send what they should not."""

    kind: Kind = "sign-flip"
    share: float = 0.1  # of all clients, also where only those of one tier are bad; at least one client
    factor: float | None = None  # how far they go; None: what is usual for the kind
    tier: str = ""  # only clients of this tier are bad; empty: of any
    target: int = 0  # of a backdoor: the class that stamped images are to be taken for

    def __post_init__(self) -> None:
        if self.kind not in FACTORS:
            raise unknown("attack", self.kind, KINDS)
        require(0 < self.share < 1, "share", self.share, "a share above 0 and below 1")
        fine = self.factor is None or 0 < self.factor < float("inf")
        require(fine, "factor", self.factor, "a number above 0")
        if self.kind in ("nan", "absent") and self.factor is not None:
            raise FedtailorError(f"factor = {self.factor}: expected none with {self.kind}, which has no size")

    @property
    def times(self) -> float:
        """The factor, where it is said and where not."""
        return FACTORS[self.kind] if self.factor is None else self.factor

    def bad_clients(self, setup: Setup) -> frozenset[int]:
        """Who is bad: drawn from the seed of the run, so that every rule meets the same ones."""
        tiers = [tier.name for tier in setup.fleet.tiers]
        if self.tier and self.tier not in tiers:
            raise unknown("tier", self.tier, tiers)
        everyone = setup.clients(0)
        able = [client.id for client in everyone if self.tier in ("", client.tier)]
        count = max(1, round(self.share * len(everyone)))
        if count > len(able):
            raise FedtailorError(
                f"share = {self.share}: {count} of {len(everyone)} clients are to be bad, but tier {self.tier!r} has "
                f"{len(able)}; expected a smaller share, or no tier"
            )
        drawn = setup.seeds.numpy("bad clients").choice(len(able), count, replace=False)
        return frozenset(able[place] for place in drawn)
