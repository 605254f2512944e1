"""Which channels a client can do without: greedy pruning of channel groups by accuracy, without a gradient.

    while C(theta) > B:  theta <- the smaller theta^j of least accuracy drop        (APFL, Algorithm 1)

Every step makes one group smaller by a share R. A *size* is the number of kept units of each elastic group, in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from fedtailor.data.batches import Examples, batch_size
from fedtailor.elasticity.costing.curves import Counts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.layout import to_run
from fedtailor.errors import FedtailorError

BATCH = 512  # images that are evaluated at once, whose statistics norm layers use

Score = Callable[[Counts], float]


@dataclass(frozen=True)
class Shrinking:
    """How a group becomes smaller: by a share R, to a number that a cut may keep, at least ``minimum``."""

    share: Fraction  # R
    minimum: int = 1

    def below(self, count: int, allowed: Sequence[int]) -> int | None:
        """The next smaller number of units, ceil(count * (1 - R)) where that is smaller; None if there is none.

        The ceiling of the paper stands still where count * R < 1, and a search that shrinks nothing never ends: there
        the group loses one unit.

        >>> [Shrinking(Fraction(1, 10)).below(count, range(1, 21)) for count in (20, 10, 9, 2, 1)]
        [18, 9, 8, 1, None]
        """
        kept = 1 - self.share
        wanted = min(-(-count * kept.numerator // kept.denominator), count - 1)
        place = bisect_right(allowed, max(wanted, self.minimum))
        smaller = allowed[place - 1] if place else count
        return smaller if self.minimum <= smaller < count else None


def prune(
    start: Counts,
    allowed: Sequence[Sequence[int]],
    fits: Callable[[Counts], bool],
    score: Score,
    macs: Callable[[Counts], int],
    shrinking: Shrinking,
    per_mac: bool = False,
) -> list[Counts]:
    """All sizes from ``start`` to the first one that fits, each with one group smaller than the one before.

    The group of least drop of the score is taken, or of least drop per saved multiply-accumulate. Ties go to the group
    that saves more, then to the earlier one.
    """
    path = [start]
    while not fits(path[-1]):
        now = path[-1]
        candidates = _smaller(now, allowed, shrinking)
        if not candidates:
            raise FedtailorError(
                f"no channel group can shrink any more, and the network is still above its budget: it keeps "
                f"{', '.join(map(str, now))} units, at least {shrinking.minimum} each; lower method.min_channels, or "
                "give the device a larger budget"
            )
        before, cost = score(now), macs(now)

        def loss(size: Counts, before: float = before, cost: int = cost) -> tuple[float, int]:
            saved = cost - macs(size)
            drop = before - score(size)
            return (drop / max(1, saved) if per_mac else drop), -saved

        path.append(min(candidates, key=loss))
    return path


def _smaller(now: Counts, allowed: Sequence[Sequence[int]], shrinking: Shrinking) -> list[Counts]:
    """For each group that can shrink, the size with this group smaller; the others keep what they have."""
    next_counts = (shrinking.below(count, each) for count, each in zip(now, allowed, strict=True))
    return [
        (*now[:group], count, *now[group + 1 :])
        for group, count in enumerate(next_counts)
        if count is not None
    ]


@dataclass
class LocalScore:
    """The accuracy of sub-networks on a client's examples, each size once.

    Norm layers use the statistics of the batch, so that every size is calibrated on the data it is judged by. A model
    whose metrics know no accuracy is judged by its loss.
    """

    model: ElasticModel
    patch: Patch  # the full super-network
    data: Examples
    found: dict[Counts, dict[str, float]] = field(default_factory=dict)
    macs: int = 0  # spent, over all examples

    def __post_init__(self) -> None:
        places = torch.arange(len(self.data)).split(BATCH)
        if len(places) > 1 and len(places[-1]) == 1:  # one example has no variance
            places = (*places[:-2], torch.cat(places[-2:]))
        self.batches = [self.data.take(chosen) for chosen in places]

    def __call__(self, size: Counts) -> float:
        values = self.metrics(size)
        return values.get("accuracy", -values["loss"])

    @torch.no_grad()
    def metrics(self, size: Counts) -> dict[str, float]:
        """Mean loss and metrics of a size."""
        if size not in self.found:
            cut = self.model.costs.cut(size)
            weights = to_run(self.model, self.model.narrow(self.patch, cut)).values
            totals: dict[str, float] = {}
            for batch in self.batches:
                output = self.model.forward(weights, cut, batch, mode="calibrate")
                values = {"loss": self.model.objective.loss(output, batch).item()}
                for name, metric in self.model.objective.metrics.items():
                    values[name] = float(metric(output, batch))
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + value * batch_size(batch)
            self.found[size] = {name: total / len(self.data) for name, total in totals.items()}
            self.macs += self.model.costs.measure("macs", size) * len(self.data)
        return self.found[size]


def searched(
    score: LocalScore, fits: Callable[[Cut], bool], shrinking: Shrinking, align: int, *, per_mac: bool
) -> tuple[Counts, int]:
    """The first size that fits on the way down from the full network, and how many steps led there."""
    costs = score.model.costs
    costs.record("macs")
    path = prune(
        costs.full, costs.members(align), lambda size: fits(costs.cut(size)), score,
        lambda size: costs.measure("macs", size), shrinking, per_mac,
    )  # fmt: skip
    return path[-1], len(path) - 1
