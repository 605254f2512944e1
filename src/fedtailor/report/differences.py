"""Whether one method is better than another, or whether the seeds alone explain it.

Runs with the same seed share split, fleet, cohorts and starting weights, so methods are compared seed by seed: what is
common to both drops out of the difference. The mean difference is judged by Student's t with n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95
ENOUGH_SEEDS = 5  # below it the interval is more than 1.4 times as wide as the normal one


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and the interval that holds the true one in 95 of 100 such experiments."""

    seeds: int
    mean: float
    deviation: float | None = None  # None: one seed has none
    half_width: float | None = None

    @property
    def beyond_noise(self) -> bool | None:
        """Whether the interval leaves zero out; None if it cannot be told.

        Accuracies come in steps of one test example, so equal differences on a few seeds are no sign of no noise.
        """
        if self.half_width is None or (self.deviation == 0 and self.mean != 0):
            return None
        return abs(self.mean) > self.half_width

    @property
    def verdict(self) -> str:
        """For people."""
        if self.beyond_noise is None:
            return "one seed: cannot be told" if self.seeds == 1 else "cannot be told"
        if not self.beyond_noise:
            return "within noise" if self.seeds >= ENOUGH_SEEDS else f"cannot be told with {self.seeds} seeds"
        return "larger than noise"


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """``second - first``, seed by seed.

    >>> paired([0.90, 0.92, 0.91], [0.95, 0.96, 0.96]).verdict
    'larger than noise'
    >>> paired([0.90, 0.92], [0.95, 0.96]).verdict      # two seeds: the interval is 12.7 standard errors wide each way
    'cannot be told with 2 seeds'
    """
    values = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.mean(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Difference(len(values), mean)
    deviation = statistics.stdev(values)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Difference(len(values), mean, deviation, quantile * deviation / math.sqrt(len(values)))


def what_seeds_can_tell(seeds: int, comparisons: int = 1) -> str:
    """How far the verdicts can be trusted, in one or two sentences."""
    if seeds == 1:
        return "One seed shows no noise: none of these differences can be told from chance. Add --seeds 5."
    factor = float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1)) / math.sqrt(seeds)
    text = (
        f"With {seeds} seeds a difference counts as larger than noise only if it exceeds {factor:.1f} times its own "
        "deviation over the seeds (95 % interval, paired t)."
    )
    if seeds < ENOUGH_SEEDS:
        text += f" What cannot be told is not equal: take {ENOUGH_SEEDS} seeds or more."
    if comparisons >= 3:
        alarms = comparisons * (1 - CONFIDENCE)
        text += f" {comparisons} comparisons: about {alarms:.2f} false alarms are to be expected."
    return text
