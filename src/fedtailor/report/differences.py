"""Whether one method is better than another, or whether the seeds alone explain it.

Runs with the same seed share split, fleet, cohorts and starting weights, so methods are compared seed by seed: what is
common to both drops out of the difference. The mean difference is judged by Student's t with n - 1 degrees of freedom.
Of several comparisons some come out by chance: verdicts are corrected for their number (Holm), intervals are not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from scipy import stats

CONFIDENCE = 0.95
POWER = 0.8  # of the experiment that ``seeds_needed`` speaks of
FEWEST_SEEDS = 2  # that have a deviation at all: its own error is as large as it is
ENOUGH_SEEDS = 5  # below it the interval is more than 1.4 times as wide as the normal one
MOST_SEEDS = 30  # that anyone runs
POINT = 0.01  # of accuracy: what people want to tell apart

K = TypeVar("K")
Words = tuple[str, str]  # for more and for less


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and the interval that holds the true one in 95 of 100 such experiments."""

    seeds: int
    mean: float
    deviation: float | None = None  # None: one seed has none
    half_width: float | None = None
    # Of a difference so large where there is none (p), corrected once it is ``judged``
    chance: float | None = None

    @property
    def beyond_noise(self) -> bool | None:
        """Whether chance is too small an explanation; None if it cannot be told.

        Accuracies come in steps of one test example, so equal differences on a few seeds are no sign of no noise.
        """
        if self.chance is None or (self.deviation == 0 and self.mean != 0):
            return None
        return self.chance < 1 - CONFIDENCE

    @property
    def interval(self) -> float | None:
        """Half the width of the interval, where it says anything: that of two seeds does so only beyond noise."""
        return self.half_width if self.seeds > FEWEST_SEEDS or self.beyond_noise else None

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
    mean, count = statistics.mean(values), len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return Difference(count, mean)
    deviation = statistics.stdev(values)
    error = deviation / math.sqrt(count)
    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    chance = 2 * float(stats.t.sf(abs(mean) / error, count - 1)) if error > 0 else 1.0
    return Difference(count, mean, deviation, half_width, chance)


def judged(family: Mapping[K, Difference]) -> dict[K, Difference]:
    """The same differences with Holm's correction: the k-th smallest of n chances counts n - k + 1 times.

    >>> one, two = (Difference(5, 0.1, 0.1, 0.1, chance) for chance in (0.02, 0.04))
    >>> [round(each.chance, 2) for each in judged({"a": two, "b": one}).values()]
    [0.04, 0.04]
    """
    chances = {name: each.chance for name, each in family.items() if each.chance is not None}
    corrected: dict[K, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[name]))
        corrected[name] = largest
    return {name: replace(each, chance=corrected.get(name)) for name, each in family.items()}


def seeds_needed(deviation: float, difference: float = POINT) -> int | None:
    """How many paired seeds tell a difference in 4 of 5 experiments, at this deviation; None: more than anyone runs.

    >>> seeds_needed(0.01), seeds_needed(0.002)
    (10, 3)
    """
    for count in range(2, MOST_SEEDS + 1):
        bound = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
        if (
            deviation == 0
            or stats.nct.sf(bound, count - 1, difference / deviation * math.sqrt(count)) >= POWER
        ):
            return count
    return None


def what_seeds_can_tell(
    seeds: int, found: Iterable[Difference] = (), points: bool = True, against: str = ""
) -> str:
    """How far the verdicts can be trusted, in a few sentences; ``points``: whether the metric comes in per cent.

    ``against``: the method that the others were compared with, whose differences have the spread that is spoken of.
    """
    if seeds == 1:
        return "One seed shows no noise: none of these differences can be told from chance. Add --seeds 5."
    factor = float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1)) / math.sqrt(seeds)
    text = (
        f"With {seeds} seeds a difference counts as larger than noise only if it exceeds {factor:.1f} times its own "
        "deviation over the seeds (95 % interval, paired t)."
    )
    told = list(found)
    if len(told) > 1:
        text += f" Verdicts are corrected for {len(told)} comparisons (Holm), intervals are not."
    if seeds < ENOUGH_SEEDS:
        text += f" What cannot be told is not equal: take {ENOUGH_SEEDS} seeds or more."
    if any(each.half_width and each.interval is None for each in told):
        text += " Two seeds tell nothing where no interval is shown."
    spreads = [each.deviation for each in told if each.deviation]
    if points and spreads:
        needed = seeds_needed(statistics.median(spreads))
        number = (
            f"{needed} seeds" if needed is not None else f"more seeds than anyone runs (over {MOST_SEEDS})"
        )
        which = f" of the differences from {against}" if against else ""
        middle = f" (median of {len(spreads)})" if len(spreads) > 1 else ""
        text += (
            f" At the spread{which} seen here{middle}, telling a difference of one point 4 times out of 5 takes "
            f"{number}."
        )
    return text


def gained(values: Sequence[float], found: Difference, unit: str, words: Words = ("higher", "lower")) -> str:
    """What one class of devices gains, seed by seed, in words; ``unit`` follows the number.

    ``found`` is the verdict: only what is larger than noise is called a gain or a loss.

    >>> gained([5.1, 4.0, 4.4], Difference(3, 4.5, chance=0.01), " points")
    'gains 4.5 points (4.0 to 5.1 over 3 seeds)'
    >>> gained([-0.4, -1.2], Difference(2, -0.8, chance=0.3), " points")
    '0.8 points lower in each of these 2 seeds (0.4 to 1.2), too few to tell'
    >>> gained([-0.4, 0.9, 0.1], Difference(3, 0.2, chance=0.7), " points")
    'higher or lower with the seed (-0.4 to +0.9 points); 3 are too few to tell'
    """
    digits, count = 1 if unit else 3, len(values)
    if not all(map(math.isfinite, values)):
        return "no number with some seeds, cannot be told"
    low, high = (round(value, digits) + 0.0 for value in (min(values), max(values)))
    mean, mixed = statistics.mean(values), low < 0 < high
    amount = f"{abs(mean):.{digits}f}{unit}"
    ends = sorted((abs(low), abs(high)))
    reach = (
        f"{low:+.{digits}f} to {high:+.{digits}f}"
        if mixed
        else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"
    )
    if found.beyond_noise:
        return f"{'gains' if mean > 0 else 'loses'} {amount} ({reach} over {count} seeds)"
    doubt = "too few to tell" if count < ENOUGH_SEEDS else found.verdict
    where = "in one seed" if count == 1 else f"in these {count} seeds"
    if mixed:
        few = f"{count} are {doubt}" if count < ENOUGH_SEEDS else doubt
        return f"{words[0]} or {words[1]} with the seed ({reach}{unit}); {few}"
    if low == high == 0:
        return f"the same {where}, {doubt}"
    if ends[0] > 0 and count > 1:
        where = f"in each of these {count} seeds"
    return f"{amount} {words[mean < 0]} {where}{f' ({reach})' if count > 1 else ''}, {doubt}"


def not_told(others: Mapping[str, Difference], sign: int = 1) -> list[str]:
    """Of the methods that are worse than another, by their differences from it, those that cannot be told from it.

    ``sign`` is -1 where less is better.
    """
    return [name for name, each in others.items() if not (each.beyond_noise and sign * each.mean < 0)]
