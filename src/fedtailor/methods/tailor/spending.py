"""What a client's steps are spent on: how often each width is drawn, and how often several networks run in one step."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def with_floor(shares: Sequence[float], floor: float) -> tuple[float, ...]:
    """Shares of ascending widths in which the first has at least ``floor``; the others keep their proportions.

    >>> with_floor([1, 1, 1, 1], 0.4), with_floor([2, 1, 1], 0.4), with_floor([1], 0.4)
    ((0.4, 0.2, 0.2, 0.2), (0.5, 0.25, 0.25), (1.0,))
    """
    total = sum(shares)
    first = shares[0] / total
    if first >= floor or len(shares) == 1:
        return tuple(share / total for share in shares)
    rest = (1 - floor) / (1 - first)
    return (floor, *(rest * share / total for share in shares[1:]))


def sandwich_of(drawn: Fraction, widths: Sequence[Fraction]) -> list[Fraction]:
    """The largest, the drawn and the smallest of ascending widths, each once, the largest first.

    >>> [str(width) for width in sandwich_of(Fraction(1, 2), (Fraction(1, 4), Fraction(1, 2), Fraction(1)))]
    ['1', '1/2', '1/4']
    """
    return sorted({widths[0], drawn, widths[-1]}, reverse=True)


def share_within(plain: float, rich: float, allowed: float) -> float:
    """How many of the steps may be the dear ones so that the mean cost is at most ``allowed``.

    >>> share_within(1, 3, 2), share_within(1, 3, 4), share_within(1, 3, 1), share_within(2, 2, 2)
    (0.5, 1.0, 0.0, 1.0)
    """
    if rich <= allowed:
        return 1.0
    return max(0.0, (allowed - plain) / (rich - plain)) if rich > plain else 0.0
