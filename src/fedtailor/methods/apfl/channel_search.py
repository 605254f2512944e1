"""Which channels a client can do without: greedy pruning of channel groups by accuracy, without a gradient.

    while C(theta) > B:  theta <- the smaller theta^j of least accuracy drop        (APFL, Algorithm 1)

Every step makes one group smaller by a share R. A *size* is the number of kept units of each elastic group, in order.
Steps are coarse, and where parameters bind, multiply-accumulates are left over: the search then goes up again, until
the budget is spent. Otherwise networks of different cost would be compared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from fedtailor.elasticity.costing.curves import Counts
from fedtailor.errors import FedtailorError
from fedtailor.methods.apfl.judging import Judge

AMOUNTS = 8  # by which a group is tried to grow at the cost of another
UNSPENT = 0.02  # the share of the multiply-accumulates that a search may leave over

Choose = Callable[[Counts, Sequence[Counts]], Counts]  # of a size and what could follow it: what does
Measure = Callable[[Counts], int]


@dataclass(frozen=True)
class Shrinking:
    """How a group becomes smaller: by a share R, to a number that is ``allowed``, of which the first is the least."""

    share: Fraction  # R

    def below(self, count: int, allowed: Sequence[int]) -> int | None:
        """The next smaller number of units, ceil(count * (1 - R)) where that is smaller; None if there is none.

        The ceiling of the paper stands still where count * R < 1, and a search that shrinks nothing never ends: there
        the group loses one unit.

        >>> [Shrinking(Fraction(1, 10)).below(count, range(1, 21)) for count in (20, 10, 9, 2, 1)]
        [18, 9, 8, 1, None]
        """
        kept = 1 - self.share
        wanted = min(-(-count * kept.numerator // kept.denominator), count - 1)
        smaller = allowed[bisect_right(allowed, max(wanted, allowed[0])) - 1]
        return smaller if smaller < count else None

    def above(self, count: int, allowed: Sequence[int]) -> Sequence[int]:
        """The larger numbers of units that a step may go back to, ascending: up to count / (1 - R), one at least.

        >>> Shrinking(Fraction(1, 10)).above(18, range(1, 41)), Shrinking(Fraction(1, 10)).above(4, (2, 4, 8))
        (range(19, 21), (8,))
        """
        kept = 1 - self.share
        first = bisect_right(allowed, count)
        last = bisect_right(allowed, count * kept.denominator // kept.numerator)
        return allowed[first : max(last, first + 1)]


@dataclass(frozen=True)
class Search:
    """Sizes that a cut may have, and what they may cost."""

    allowed: Sequence[Sequence[int]]  # for each group the numbers of units that a cut may keep
    fits: Callable[[Counts], bool]
    macs: Measure
    shrinking: Shrinking

    def down(self, start: Counts, choose: Choose) -> list[Counts]:
        """All sizes from ``start`` to the first one that fits, each with one group smaller than the one before."""
        path = [start]
        while not self.fits(path[-1]):
            candidates = self._smaller(path[-1])
            if not candidates:
                raise FedtailorError(
                    f"no channel group can shrink any more, and the network is still above its budget: it keeps "
                    f"{', '.join(map(str, path[-1]))} units; lower method.smallest (and method.min_channels), or give "
                    "the device a larger budget"
                )
            path.append(choose(path[-1], candidates))
        return path

    def up(self, start: Counts, enough: float, choose: Choose) -> list[Counts]:
        """From a size that fits to one that spends enough multiply-accumulates, or to where no step is left.

        Each size spends more than the one before. A group that cannot grow because another limit binds may grow at the
        cost of the group that pays with the fewest multiply-accumulates.
        """
        path = [start]
        while self.macs(path[-1]) < enough:
            candidates = self._larger(path[-1])
            if not candidates:
                break
            path.append(choose(path[-1], candidates))
        return path

    def _smaller(self, now: Counts) -> list[Counts]:
        """For each group that can shrink, the size with this group smaller; the others keep what they have."""
        next_counts = (
            self.shrinking.below(count, each) for count, each in zip(now, self.allowed, strict=True)
        )
        return [_with(now, group, count) for group, count in enumerate(next_counts) if count is not None]

    def _larger(self, now: Counts) -> list[Counts]:
        """For each group that can grow, the size with this group as much larger as fits within one step."""
        found = []
        for group, count in enumerate(now):
            more = self.shrinking.above(count, self.allowed[group])
            fitting = self._fitting(now, group, more)
            if fitting:
                found.append(_with(now, group, more[fitting - 1]))
            else:
                # One unit may cost more than it brings, ten may not.
                tried = more[:: max(1, len(more) // AMOUNTS)]
                offers = (offer for count in tried for offer in self._paid(_with(now, group, count), group))
                best = max(offers, key=self.macs, default=now)
                found += [best] if self.macs(best) > self.macs(now) else []
        return found

    def _paid(self, wanted: Counts, grown: int) -> Iterator[Counts]:
        """A size that is too large, made to fit by one other group: for each that can pay, with as little as it can."""
        for group, count in enumerate(wanted):
            less = self.allowed[group][: bisect_left(self.allowed[group], count)]
            fitting = 0 if group == grown else self._fitting(wanted, group, less)
            if fitting:
                yield _with(wanted, group, less[fitting - 1])

    def _fitting(self, size: Counts, group: int, counts: Sequence[int]) -> int:
        """How many of ascending numbers of units of one group fit: what costs less than one that fits, fits."""
        return bisect_left(counts, True, key=lambda count: not self.fits(_with(size, group, count)))


def _with(size: Counts, group: int, count: int) -> Counts:
    return (*size[:group], count, *size[group + 1 :])


def searched(
    judge: Judge,
    limits: Mapping[str, int | Fraction],
    least: Counts,
    share: Fraction,
    align: int,
    *,
    per_mac: bool,
) -> tuple[Counts, int]:
    """A size within the limits that spends its multiply-accumulates, and how many steps led there.

    No group falls below its ``least`` number of units. Ties go to the size that is nearest to the budget.
    """
    costs = judge.model.costs
    costs.record("macs")

    def macs(size: Counts) -> int:
        return costs.measure("macs", size)

    def fits(size: Counts) -> bool:
        return all(costs.measure(name, size) <= limit for name, limit in limits.items())

    def choose(now: Counts, candidates: Sequence[Counts], sign: int) -> Counts:
        def changed(size: Counts) -> float:
            return sign * (macs(size) - macs(now))

        def price(size: Counts) -> float:
            return max(1.0, changed(size)) if per_mac else 1.0

        return judge.best(now, candidates, prefer=changed, price=price)

    members = costs.members(align)
    allowed = [each[bisect_left(each, few) :] for each, few in zip(members, least, strict=True)]
    search = Search(allowed, fits, macs, Shrinking(share))
    down = search.down(costs.full, partial(choose, sign=-1))
    enough = float(limits["macs"]) * (1 - UNSPENT) if "macs" in limits else 0.0
    up = search.up(down[-1], enough, partial(choose, sign=1)) if len(down) > 1 else down
    return up[-1], len(down) + len(up) - 2
