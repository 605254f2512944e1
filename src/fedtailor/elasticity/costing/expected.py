"""Expected multiply-accumulates of random sub-networks, and the keep-probabilities that meet a budget.

Unit j of a group stays with probability p_j, independently of all others. A layer's cost is a product of sizes that
are linear in the kept units n_g of each group g. Different groups are independent, so means multiply; where both axes
of a layer belong to one group, E[n^2] = (sum p)^2 + sum p (1 - p).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.batches import inputs_of
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import examples_in
from fedtailor.elasticity.costing.curves import Curve
from fedtailor.elasticity.costing.fitting import fit
from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.errors import FedtailorError, require

Probabilities = Mapping[str, NDArray[np.float64]]  # group -> one probability per unit
HALVINGS = 100  # of the interval that holds the solution: beyond double precision
EXACT = 1e-12  # relative error of a cost that counts as none


def expected_macs(costs: ModelCosts, probabilities: Probabilities) -> float:
    """The mean over all draws of one example's multiply-accumulates."""
    groups = costs.pieces.groups.elastic
    means = np.array([float(probabilities[group].sum()) for group in groups])
    variances = np.array(
        [float((probabilities[group] * (1 - probabilities[group])).sum()) for group in groups]
    )
    batch = examples_in(*inputs_of(costs.pieces.example))
    return _mean(mac_curve(costs), means, variances) / batch


def mac_curve(costs: ModelCosts) -> Curve:
    """Multiply-accumulates of the example batch as a function of the kept units."""
    curve = costs.curve("macs")
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


def uniform_probability(costs: ModelCosts, budget: Budget) -> float:
    """The one probability for all units at which the expected cost is what the budget allows."""
    full = float(costs.measure("macs", costs.full))
    allowed = float(allowed_macs(costs, budget))

    def cost(probability: float) -> float:
        units = {g: np.full(costs.pieces.groups.counts[g], probability) for g in costs.pieces.groups.elastic}
        return expected_macs(costs, units)

    if allowed >= full:
        return 1.0
    if not costs.pieces.groups.elastic:
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


def project(costs: ModelCosts, probabilities: Vector, budget: Budget, smallest: float = 0.0) -> Vector:
    """The probabilities times a common factor, held within [``smallest``, 1], at exactly the budget's cost.

    The cost never falls as the factor grows, so there is one; a point that has the right cost stays as it is.
    """
    fine = (probabilities >= 0) & (probabilities <= 1)
    if probabilities.shape != (costs.pieces.units.total,) or not fine.all():
        odd = probabilities[~fine][:1].tolist() or [probabilities.shape]
        raise FedtailorError(
            f"probabilities with {odd[0]}: expected {costs.pieces.units.total} numbers from 0 to 1, one for each unit"
        )
    require(0 <= smallest <= 1, "smallest probability", smallest, "a number from 0 to 1")
    allowed = allowed_macs(costs, budget)
    if allowed >= float(costs.measure("macs", costs.full)):
        return np.ones_like(probabilities)

    def cost(each: Vector) -> float:
        return expected_macs(costs, costs.pieces.units.by_group(each))

    def scaled(factor: float) -> Vector:
        return np.clip(factor * probabilities, smallest, 1.0)

    if probabilities.min() >= smallest and abs(cost(probabilities) / allowed - 1) <= EXACT:
        return probabilities
    if cost(scaled(0.0)) > allowed:
        least = cost(scaled(0.0)) / float(costs.measure("macs", costs.full))
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
    from scipy.optimize import brentq  # slow to import, and only Flado's clients need it

    factor = brentq(lambda factor: cost(scaled(factor)) - allowed, low, high, xtol=1e-15, maxiter=HALVINGS)
    return scaled(factor)


def allowed_macs(costs: ModelCosts, budget: Budget) -> float:
    """The multiply-accumulates that a budget allows; a budget of another kind allows what its largest cut costs."""
    if budget.macs is None:
        return float(costs.of(fit(costs, budget)).macs)
    limit = budget.limits["macs"]
    return float(limit) if isinstance(limit, int) else float(limit * costs.measure("macs", costs.full))
