"""Differences as whole numbers whose sum over all members of a class stays below 2^32.

q = round((u + a) s),   u = (w / W) D cut off at a,   s = (2^b - 1) / 2a,   b = 32 - ceil(log2 n)
mean of D = W (sum of q / s - m a) / sum of w          over the m of n members that have sent
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedtailor.secure.streams import Words

WORD_BITS = 32


@dataclass(frozen=True)
class Scale:
    """How the members of a class quantise."""

    members: int
    range: float  # a: how far a weight may move
    most: int  # W: the largest weight that a client may have

    @property
    def steps(self) -> float:
        """s: numbers per unit of difference."""
        bits = WORD_BITS - max(1, (self.members - 1).bit_length())
        return float((1 << bits) - 1) / (2 * self.range)

    def words(self, difference: NDArray[np.float64], weight: int) -> Words:
        """A client's row, and its weight as the last word."""
        scaled = np.clip(weight / self.most * difference, -self.range, self.range)
        whole = np.rint((scaled + self.range) * self.steps).astype(np.uint32)
        return np.append(whole, np.uint32(weight))

    def mean(self, total: Words, senders: int) -> NDArray[np.float64]:
        """The weighted mean of the differences, from the sum of the words of so many."""
        numbers, weight = total[:-1].astype(np.float64), float(total[-1])
        return self.most * (numbers / self.steps - senders * self.range) / weight

    @property
    def error(self) -> float:
        """The most that rounding moves the mean where all clients weigh the same."""
        return 1 / (2 * self.steps)
