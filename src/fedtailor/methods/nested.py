"""P, the widths that methods of nested networks train: a list, or those that the tiers of the fleet can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol, TypeVar, cast

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, fit_among
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import WidthLike, as_candidates, as_width
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError, require
from fedtailor.method import Method

FLEET = "fleet"
TRIED = as_candidates("uniform-100")  # where the width of a budget in MACs, parameters or bytes is looked for

Widths = str | tuple[WidthLike, ...]


class Nested(Protocol):
    """A method with a list of widths."""

    @property
    def widths(self) -> Widths: ...
    @property
    def cut_at(self) -> Callable[[Fraction, ElasticModel], Cut]: ...


class Composed(Nested, Protocol):
    """One whose layers are put together from fragments."""

    @property
    def input_share(self) -> WidthLike: ...


N = TypeVar("N", bound=Nested)
C = TypeVar("C", bound=Composed)


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
    return _with_widths(method, budgets, model)


def with_composable_widths(method: C, budgets: Sequence[Budget], model: ElasticModel) -> C:
    """The same in multiples of the fragments that layers are composed of, which must divide the inputs of every width.

    A tier that can run less than one of them has its own width, or the largest in hundredths.
    """
    fragments = 1 / as_width(method.input_share)
    coarse = as_candidates(f"uniform-{fragments}") if fragments.denominator == 1 else ()
    return _with_widths(method, budgets, model, coarse)


def _with_widths(
    method: N, budgets: Sequence[Budget], model: ElasticModel, coarse: Sequence[Fraction] = ()
) -> N:
    """Widths of a coarse list where one of them fits a budget, else its own or hundredths."""
    if method.widths != FLEET:
        return method

    def width_for(budget: Budget) -> Fraction:
        if coarse:
            with suppress(TooSmallError):
                return _fitting(method, budget, coarse, model)
        own = [] if budget.width is None else [Fraction(budget.width)]
        return _fitting(method, budget, sorted({*TRIED, *own}), model)

    return cast(N, replace(cast(Any, method), widths=tuple(sorted({width_for(each) for each in budgets}))))


def _fitting(method: Nested, budget: Budget, widths: Sequence[Fraction], model: ElasticModel) -> Fraction:
    cut = fit_among(model.costs, budget, widths, lambda width: method.cut_at(width, model))
    return cut.width or Fraction(1)


def has_fleet_widths(method: Method, budgets: Sequence[Budget], model: ElasticModel) -> bool:
    """Whether a method that can take its widths from a fleet has just these."""
    own: Any = method
    knows = type(own).for_fleet in (with_fleet_widths, with_composable_widths)
    return knows and replace(own, widths=FLEET).for_fleet(budgets, model) == method
