"""Expected multiply-accumulates of random sub-networks, and the keep-probabilities that meet a budget.

Unit j of a group stays with probability p_j, independently of all others. A layer's cost is a product of sizes that
are linear in the kept units n_g of each group g. Different groups are independent, so means multiply; where both axes
of a layer belong to one group, E[n^2] = (sum p)^2 + sum p (1 - p).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.batches import inputs_of
from fedtailor.elastic.budget import Budget, fit
from fedtailor.elastic.cost import examples_in
from fedtailor.elastic.curves import Curve
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.unit_map import Vector
from fedtailor.errors import FedtailorError, require

Probabilities = Mapping[str, NDArray[np.float64]]  # group -> one probability per unit
HALVINGS = 100  # of the interval that holds the solution: beyond double precision
EXACT = 1e-12  # relative error of a cost that counts as none


def expected_macs(model: ElasticModel, probabilities: Probabilities) -> float:
    """The mean over all draws of one example's multiply-accumulates."""
    groups = model.groups.elastic
    means = np.array([float(probabilities[group].sum()) for group in groups])
    variances = np.array(
        [float((probabilities[group] * (1 - probabilities[group])).sum()) for group in groups]
    )
    batch = examples_in(*inputs_of(model.example))
    return _mean(mac_curve(model), means, variances) / batch


def mac_curve(model: ElasticModel) -> Curve:
    """Multiply-accumulates of the example batch as a function of the kept units."""
    curve = model.costs.curve("macs")
    if curve is None:
        raise FedtailorError(
            "the cost of this model does not follow its channels; expected costs need one that does"
        )
    return curve


def _mean(curve: Curve, means: NDArray[np.float64], variances: NDArray[np.float64]) -> float:
    """E of a sum of products of linear sizes, of which at most two in a product vary."""
    varying = (curve.slopes != 0).any(axis=2)  # (parts, axes)
    if int(varying.sum(axis=1).max(initial=0)) > 2:
        raise FedtailorError(
            "a layer of this model multiplies three channel axes; its expected cost is not known"
        )
    product = (curve.constants + curve.slopes @ means).prod(axis=1)
    # Covariance of the two varying sizes of each part, times the sizes that do not vary.
    both = np.where(varying[:, :, None], curve.slopes, 1)
    pairs = (varying.sum(axis=1) == 2)[:, None]
    still = np.where(varying, 1, curve.constants).prod(axis=1)
    covariance = (np.where(pairs, both.prod(axis=1), 0) @ variances) * still
    return float(curve.times @ (product + covariance))


def uniform_probability(model: ElasticModel, budget: Budget) -> float:
    """The one probability for all units at which the expected cost is what the budget allows."""
    full = float(model.costs.measure("macs", model.costs.full))
    allowed = float(allowed_macs(model, budget))

    def cost(probability: float) -> float:
        units = {g: np.full(model.groups.widths[g], probability) for g in model.groups.elastic}
        return expected_macs(model, units)

    if allowed >= full:
        return 1.0
    if not model.groups.elastic:
        raise FedtailorError(
            f"{budget}: no channel of this model can shrink, so the smallest feasible share of it is 1 "
            "(`fedtailor profile` says why)"
        )
    smallest = cost(0.0)
    if allowed <= smallest:
        raise FedtailorError(
            f"{budget} allows {allowed:,.0f} multiply-accumulates, but what cannot shrink costs {smallest:,.0f}: "
            f"the smallest feasible share of this model is above {smallest / full:.3g}"
        )
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= allowed else (low, middle)
    return low


def project(model: ElasticModel, probabilities: Vector, budget: Budget, smallest: float = 0.0) -> Vector:
    """The probabilities times a common factor, held within [``smallest``, 1], at exactly the budget's cost.

    The cost never falls as the factor grows, so halving finds it; a point that has the right cost stays as it is.
    """
    fine = (probabilities >= 0) & (probabilities <= 1)
    if probabilities.shape != (model.units.total,) or not fine.all():
        odd = probabilities[~fine][:1].tolist() or [probabilities.shape]
        raise FedtailorError(
            f"probabilities with {odd[0]}: expected {model.units.total} numbers from 0 to 1, one for each unit"
        )
    require(0 <= smallest <= 1, "smallest probability", smallest, "a number from 0 to 1")
    allowed = allowed_macs(model, budget)
    if allowed >= float(model.costs.measure("macs", model.costs.full)):
        return np.ones_like(probabilities)

    def cost(each: Vector) -> float:
        return expected_macs(model, model.units.by_group(each))

    def scaled(factor: float) -> Vector:
        return np.clip(factor * probabilities, smallest, 1.0)

    if probabilities.min() >= smallest and abs(cost(probabilities) / allowed - 1) <= EXACT:
        return probabilities
    if cost(scaled(0.0)) > allowed:
        least = cost(scaled(0.0)) / float(model.costs.measure("macs", model.costs.full))
        raise FedtailorError(
            f"{budget} allows {allowed:,.0f} multiply-accumulates: with probabilities of at least {smallest} "
            f"the smallest feasible share of this model is {least:.3g}"
        )
    # A unit at zero stays there whatever the factor; then not every cost can be reached.
    low, high = 0.0, 1 / max(float(probabilities[probabilities > 0].min(initial=1.0)), 1e-9)
    if cost(scaled(high)) < allowed:
        raise FedtailorError(
            f"{budget}: probabilities of zero cannot be raised to this cost; expected more units above 0"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(scaled(middle)) <= allowed else (low, middle)
    return scaled(low)


def allowed_macs(model: ElasticModel, budget: Budget) -> float:
    """The multiply-accumulates that a budget allows; a budget of another kind allows what its largest cut costs."""
    if budget.macs is None:
        return float(model.cost(fit(model, budget)).macs)
    limit = budget.limits["macs"]
    return (
        float(limit)
        if isinstance(limit, int)
        else float(limit * model.costs.measure("macs", model.costs.full))
    )


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
