"""How private a run is, as settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedtailor.errors import FedtailorError, require, unknown

Sampling = Literal["poisson", "fixed", "known"]
SAMPLINGS: tuple[Sampling, ...] = ("poisson", "fixed", "known")
Amounts = float | dict[str, float]  # one for all, or one for each tier's ring


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy of whole clients: differences are clipped, and noise is added to their sums.

    A *ring* is what a tier holds and no smaller one does: coordinates are counted to the smallest tier that holds them.
    As they are, settings change nothing.
    """

    clip: Amounts = 0.0
    """The largest L2 norm of a client's whole difference to what it was sent; a table: in each tier's ring. 0: any."""
    noise: Amounts = 0.0
    """Standard deviation of the noise on sums, in units of clip; a table: in each tier's ring. 0: none, or as much as
    epsilon needs."""
    epsilon: float = 0.0
    """What no tier may spend more of in the whole run. 0: no such limit."""
    delta: float = 1e-5
    """The probability that epsilon does not hold; far below one in the number of clients."""
    sampling: Sampling = "poisson"
    """poisson: each client takes part with the same probability; fixed: always clients_per_round of them; known: the
    same, and who takes part is no secret."""
    seeded: bool = False
    """Draw noise and clients from the run's seed: the same run again, and not private. For experiments."""

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                fine = bool(value) and all(0 < each < math.inf for each in value.values())
                require(fine, f"privacy.{name}", value, "numbers above 0, one for each tier")
                continue
            if name == "clip" and value == math.inf:
                object.__setattr__(self, "clip", 0.0)
                continue
            require(0 <= value < math.inf, f"privacy.{name}", value, "at least 0")
        require(0 <= self.epsilon < math.inf, "privacy.epsilon", self.epsilon, "at least 0")
        require(0 < self.delta < 1, "privacy.delta", self.delta, "above 0 and below 1, such as 1e-5")
        if self.sampling not in SAMPLINGS:
            raise unknown("privacy.sampling", self.sampling, SAMPLINGS)
        named, value = ("noise", self.noise) if self.noise else ("epsilon", self.epsilon)
        if value and not self.clip:
            raise FedtailorError(
                f"privacy.{named} = {value!r}: expected privacy.clip with it, such as 1.0; without a bound on what a "
                "client can change, no noise hides it"
            )

    @property
    def active(self) -> bool:
        """Whether anything is clipped or hidden."""
        return bool(self.clip or self.noise)

    @property
    def hides(self) -> bool:
        """Whether there is noise."""
        return bool(self.noise or self.epsilon)


def by_ring(name: str, value: Amounts, tiers: Sequence[str]) -> list[float]:
    """An amount for the ring of every tier."""
    if not isinstance(value, Mapping):
        return [float(value)] * len(tiers)
    for tier in value:
        if tier not in tiers:
            raise unknown(f"tier in privacy.{name}", tier, tiers)
    missing = [tier for tier in tiers if tier not in value]
    require(not missing, f"privacy.{name}", value, f"a number for every tier, also for {', '.join(missing)}")
    return [float(value[tier]) for tier in tiers]
