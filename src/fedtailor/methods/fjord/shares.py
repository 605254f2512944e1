"""How often each of several networks is trained so that the mean cost of a step is what a budget allows."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.expected import allowed_macs
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError


def shares_of(networks: Sequence[Cut], budget: Budget, model: ElasticModel) -> tuple[float, ...]:
    """Shares of ascending networks at which the mean multiply-accumulates are those that a budget allows."""
    costs = [float(model.cost(cut).macs) for cut in networks]
    return mean_shares(costs, allowed_macs(model.costs, budget), budget)


def mean_shares(costs: Sequence[float], allowed: float, budget: Budget) -> tuple[float, ...]:
    """Shares of ascending costs whose mean is ``allowed``: all up to some cost alike, or, beyond that, all above one.

    >>> mean_shares([1, 2, 6], 2, Budget(macs=2))      # two thirds of {1, 2}, one of {1, 2, 6}
    (0.4444444444444445, 0.4444444444444445, 0.1111111111111111)
    """
    count = len(costs)
    runs = [range(1 + last) for last in range(count)] + [range(first, count) for first in range(1, count)]
    means = [sum(costs[i] for i in run) / len(run) for run in runs]
    if allowed < means[0]:
        raise FedtailorError(
            f"{budget} allows {allowed:,.0f} multiply-accumulates: the smallest of the networks needs "
            f"{means[0]:,.0f}, so the smallest feasible share is {means[0] / costs[-1]:.3g}"
        )
    above = next((place for place, mean in enumerate(means) if mean > allowed), len(runs) - 1)
    below = max(0, above - 1)
    gap = means[above] - means[below]
    part = min(1.0, (allowed - means[below]) / gap) if gap > 0 else 0.0
    mixed = [0.0] * count
    for run, weight in ((runs[below], 1 - part), (runs[above], part)):
        for index in run:
            mixed[index] += weight / len(run)
    return tuple(mixed)
