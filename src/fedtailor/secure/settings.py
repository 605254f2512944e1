"""Whether updates are summed under masks, as settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtailor.errors import require

LEAST = 2  # a sum over one client is its update


@dataclass(frozen=True)
class SecureSettings:
    """Secure aggregation: updates are quantised and masked, and masks cancel in the sum. As they are, nothing is."""

    threshold: int = 0
    """At least so many clients must send a class of coordinates, or it rests for the round. 0: no masks."""
    range: float = 1.0
    """How far a weight may move in a client's training; further is cut off. The quantisation is the finer, the less."""

    def __post_init__(self) -> None:
        fine = self.threshold == 0 or self.threshold >= LEAST
        require(fine, "secure.threshold", self.threshold, f"0, or at least {LEAST} clients")
        require(0 < self.range < math.inf, "secure.range", self.range, "a number above 0, such as 1.0")

    @property
    def active(self) -> bool:
        """Whether updates are masked."""
        return self.threshold > 0
