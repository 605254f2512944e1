"""Which evaluated round was the best, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedtailor.errors import require, unknown
from fedtailor.record import Best, Tiers, headline, less_is_better

MEAN = "mean"
ROUNDING = 1e-6  # of a score: what another order of the same sums may change


@dataclass(frozen=True)
class Stopping:
    """Early stopping and the choice of the final round.

    Both look at validation examples (``data.validation``). Without these they look at the test examples, and a figure
    of a round that was chosen this way is a little too good.
    """

    patience: int = 0
    """Stop after this many evaluations without a better one; 0 runs all rounds."""
    min_delta: float = 0.0
    """By how much an evaluation must be better to count."""
    metric: str = "auto"
    """What is compared: a metric, loss, or auto for the first metric."""
    tier: str = MEAN
    """Whose metric: a tier's name, or mean for the mean over all tiers."""
    goal: Literal["auto", "max", "min"] = "auto"
    """Whether more or less is better; auto: less for loss and errors, more for everything else."""
    restore_best: bool = False
    """End with the weights of the best evaluated round instead of the last."""

    def __post_init__(self) -> None:
        require(self.patience >= 0, "stopping.patience", self.patience, "at least 0")
        fine = math.isfinite(self.min_delta) and self.min_delta >= 0
        require(fine, "stopping.min_delta", self.min_delta, "at least 0")
        require(self.goal in ("auto", "max", "min"), "stopping.goal", self.goal, "auto, max or min")

    @property
    def chooses(self) -> bool:
        """Whether what an evaluation shows decides anything."""
        return self.patience > 0 or self.restore_best

    def judge(self, best: Best | None, round: int, tiers: Tiers) -> Best:
        """The best evaluation after this one; of equal ones the earlier stays."""
        name, value = self._value(tiers)
        sign = -1 if self.goal == "min" or (self.goal == "auto" and less_is_better(name)) else 1
        if best is None or math.isnan(best.value):
            return Best(round, value)
        gained = sign * (value - best.value)  # NaN is never better
        least = max(self.min_delta, ROUNDING * abs(best.value))
        return Best(round, value) if gained > least else Best(best.round, best.value, best.since + 1)

    def reached(self, best: Best | None) -> bool:
        """Whether to stop now."""
        return self.patience > 0 and best is not None and best.since >= self.patience

    def check_tier(self, tiers: list[str]) -> None:
        """Refuse a tier that the fleet does not have."""
        if self.tier != MEAN and self.tier not in tiers:
            raise unknown("tier (stopping.tier)", self.tier, [MEAN, *tiers])

    def _value(self, tiers: Tiers) -> tuple[str, float]:
        first = next(iter(tiers.values()))
        name = headline(tiers) if self.metric == "auto" else self.metric
        if name not in first:
            raise unknown("metric (stopping.metric)", name, first)
        values = (
            [metrics[name] for metrics in tiers.values()] if self.tier == MEAN else [tiers[self.tier][name]]
        )
        return name, sum(values) / len(values)
