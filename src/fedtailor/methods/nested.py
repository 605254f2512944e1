"""P, the widths that methods of nested networks train: a list, or those that the tiers of the fleet can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol, TypeVar, cast

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import fit_among
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import WidthLike, as_candidates
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError, require

FLEET = "fleet"
TRIED = as_candidates("uniform-100")  # where the width of a budget in MACs, parameters or bytes is looked for

Widths = str | tuple[WidthLike, ...]


class Nested(Protocol):
    """A method with a list of widths."""

    @property
    def widths(self) -> Widths: ...
    @property
    def cut_at(self) -> Callable[[Fraction, ElasticModel], Cut]: ...


N = TypeVar("N", bound=Nested)


def as_widths(widths: Widths) -> Widths:
    """``fleet`` as it is, everything else as exact rationals."""
    return widths if widths == FLEET else as_candidates(widths)


def known(widths: Widths) -> tuple[Fraction, ...]:
    """P, ascending; a run settles ``fleet`` before it asks a hook."""
    if widths == FLEET:
        raise FedtailorError(
            f'method.widths = "{FLEET}": expected a list here; a run takes the widths of its fleet'
        )
    return cast(tuple[Fraction, ...], widths)


def require_shares(shares: Sequence[float], widths: Widths) -> None:
    """Refuse a distribution over P that has not one share for each of its widths."""
    if widths == FLEET:
        expected = f'none with method.widths = "{FLEET}", which is known when a run starts'
        require(not shares, "method.probabilities", shares, expected)
        return
    count = len(known(widths))
    fine = len(shares) == count and all(0 < share <= 1 for share in shares)
    expected = f"one number above 0 for each of the {count} widths, or none"
    require(fine, "method.probabilities", shares, expected)


def with_fleet_widths(method: N, budgets: Sequence[Budget], model: ElasticModel) -> N:
    """The method with a list: for every tier its own width, or the largest in hundredths within its limits."""
    if method.widths != FLEET:
        return method
    tried = sorted({*TRIED, *(Fraction(budget.width) for budget in budgets if budget.width is not None)})
    cuts = [
        fit_among(model.costs, budget, tried, lambda width: method.cut_at(width, model)) for budget in budgets
    ]
    widths = tuple(sorted({cut.width or Fraction(1) for cut in cuts}))
    return cast(N, replace(cast(Any, method), widths=widths))
