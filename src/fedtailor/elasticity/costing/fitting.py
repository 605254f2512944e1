"""The largest cut that a budget allows, and the reason why it is not larger."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from fedtailor.elasticity.costing.budget import LIMITS, Budget, Limit, amount, limit_text
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.curves import Counts
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import Exit, ending
from fedtailor.elasticity.cutting.selections import kept, prefix
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.running.exits import exits_of
from fedtailor.errors import FedtailorError, require, unknown

Family = Literal["uniform", "per_group", "shapes"]
FAMILIES = ("uniform", "per_group", "shapes")

CHANNEL_LIMITS = frozenset(LIMITS) - {"density", "depth"}  # what leaving out whole channels can keep to
NOT_COSTS = ("width", "density", "depth")  # limits that say how a cut is made


class TooSmallError(FedtailorError):
    """No piece of the model fits a device."""


class BudgetError(TooSmallError):
    """Even the smallest cut breaks a limit; says which one binds and how far away it is."""

    def __init__(self, limit: str, allowed: int | Fraction, needed: int, message: str) -> None:
        super().__init__(message)
        self.limit, self.allowed, self.needed = limit, allowed, needed

    def __reduce__(self) -> tuple[type[BudgetError], tuple[object, ...]]:
        return type(self), (self.limit, self.allowed, self.needed, str(self))


@dataclass(frozen=True)
class Fit:
    """A cut that meets a budget, and what keeps it from being larger."""

    cut: Cut
    cost: Cost
    binding: tuple[str, ...]  # the limits that larger cuts of the family break; none for the full model


def fit(
    costs: ModelCosts,
    budget: Budget,
    align: int = 1,
    *,
    family: Family = "uniform",
    workload: Workload | None = None,
) -> Cut:
    """The largest cut of a family that meets every limit of the budget.

    ``uniform``: the widest prefix cut, which runs as deep as ``depth`` allows. ``per_group``: progressive filling. All
    groups widen together until a limit stops them; the groups that cannot take one more unit, tried in the order of the
    model, stay as they are, and the others go on, until none can grow. ``shapes``: the widest prefix cut at each exit,
    and of these the one with most multiply-accumulates, of equals the deepest. ``workload`` is the training step that
    ``memory`` and ``step_time`` speak of.
    """
    if family == "shapes":
        return largest_shape(fitting_shapes(costs, budget, align, workload=workload)).cut
    return _Search(costs, budget, align, workload, _deepest(costs, budget)).largest(family)[0]


def fit_with_reason(
    costs: ModelCosts,
    budget: Budget,
    align: int = 1,
    *,
    family: Family = "uniform",
    workload: Workload | None = None,
) -> Fit:
    """The cut that ``fit`` finds, its cost, and the limits that bind it."""
    if family == "shapes":
        return largest_shape(fitting_shapes(costs, budget, align, workload=workload))
    return _Search(costs, budget, align, workload, _deepest(costs, budget)).fit(family)


def fitting_shapes(
    costs: ModelCosts, budget: Budget, align: int = 1, *, workload: Workload | None = None
) -> list[Fit]:
    """The widest piece that a budget allows at each exit of the model, the deepest last; refused if there is none."""
    found: list[Fit] = []
    problem: TooSmallError | None = None
    for at in _ends(costs, budget):
        try:
            found.append(_Search(costs, budget, align, workload, at).fit("uniform"))
        except TooSmallError as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return found


def largest_shape(shapes: Sequence[Fit]) -> Fit:
    """The one that computes most; of equals the deepest."""
    return max(reversed(shapes), key=lambda shape: shape.cost.macs)


def _ends(costs: ModelCosts, budget: Budget) -> list[Exit]:
    """The exits that are no deeper than a budget allows."""
    exits = exits_of(costs.pieces.module)
    deepest = Fraction(1) if budget.depth is None else Fraction(budget.depth)
    found = [each for each in exits if each.depth <= deepest]
    if not found:
        raise TooSmallError(
            f"depth = {budget.depth}: no exit of this model is so early, the first one comes after "
            f"{exits[0].depth} of its blocks; name earlier ones with exits = [...]"
        )
    return found


def _deepest(costs: ModelCosts, budget: Budget) -> Exit | None:
    """The last exit that a limit on depth allows; None, the whole model, where there is no such limit."""
    return None if budget.depth is None else _ends(costs, budget)[-1]


class _Search:
    """Looks for the largest cut under fixed limits; every comparison is exact."""

    def __init__(
        self,
        costs: ModelCosts,
        budget: Budget,
        align: int,
        workload: Workload | None,
        at: Exit | None = None,
    ) -> None:
        require(align >= 1, "align", align, "a whole number of at least 1")
        if budget.density is not None:
            raise FedtailorError(
                f"density = {budget.density}: a cut keeps every weight of its channels; only methods that leave "
                "out single weights keep to a density"
            )
        self.whole, self.at = costs, at
        self.shallow = budget.depth is not None and at is not None and at.depth < 1
        self.costs = costs if at is None else costs.without(at.absent)
        self.align, self.workload = align, workload
        self.full, self.members = costs.full, costs.members(align)
        self.ceiling = Fraction(budget.width) if budget.width is not None else Fraction(1)
        self.limits = _cost_limits(budget)
        for name in self.limits:
            self.costs.record(name)
        self.allowed = absolute_limits(costs, budget, workload)

    def largest(self, family: str) -> tuple[Cut, tuple[str, ...]]:
        """The largest cut of a family, and the limits that keep it from being larger."""
        if family not in FAMILIES:
            raise unknown("family", family, FAMILIES)
        width, binding = self.uniform()
        cut = prefix(self.costs.pieces.groups, width, self.align)
        if family == "per_group":
            counts, binding = self.per_group(width)
            if counts != self.counts(width):
                cut = self.whole.cut(counts)
        if self.at is None:
            return cut, binding
        return ending(cut, self.at), (*binding, "depth") if self.shallow else binding

    def fit(self, family: str) -> Fit:
        """The largest cut of a family, its cost, and what keeps it from being larger."""
        cut, binding = self.largest(family)
        return Fit(cut, self.cost(cut), binding)

    def broken(self, counts: Counts) -> tuple[str, ...]:
        costs = self.costs
        return tuple(n for n in self.limits if costs.measure(n, counts, self.workload) > self.allowed[n])

    def cost(self, cut: Cut) -> Cost:
        workload = self.workload or Workload()
        cost = self.costs.of(cut, workload if "memory" in self.limits else self.workload)
        if "step_time" not in self.limits:
            return cost
        return replace(cost, step_time=self.costs.measure("step_time", self.costs.counts(cut), workload))

    def counts(self, width: Fraction) -> Counts:
        wanted = (kept(width, full) for full in self.full)
        return tuple(each[bisect_left(each, count)] for each, count in zip(self.members, wanted, strict=True))

    def uniform(self) -> tuple[Fraction, tuple[str, ...]]:
        """The widest width that fits, and the limits that the next one breaks."""
        if not self.limits:
            return self.ceiling, () if self.counts(self.ceiling) == self.full else ("width",)
        widths = self.changes(set(range(len(self.full))), Fraction(0))
        self.refuse_smallest(self.counts(widths[0]))
        last = _last(len(widths), lambda index: not self.broken(self.counts(widths[index])))
        if last + 1 < len(widths):
            return widths[last], self.broken(self.counts(widths[last + 1]))
        return widths[last], () if self.counts(self.ceiling) == self.full else ("width",)

    def per_group(self, width: Fraction) -> tuple[Counts, tuple[str, ...]]:
        """Counts from which no group can grow, and the limits that growing one would break."""
        counts, ceilings = self.counts(width), self.counts(self.ceiling)
        while growing := {g for g, each in self.steps(counts, ceilings).items() if not self.broken(each)}:
            # Once is enough where costs only rise; with attention of equal sizes, growing may make room.
            counts = self.filled(counts, ceilings, growing)
        broken = {name for each in self.steps(counts, ceilings).values() for name in self.broken(each)}
        if any(
            count == ceiling < full for count, ceiling, full in zip(counts, ceilings, self.full, strict=True)
        ):
            broken.add("width")
        return counts, tuple(name for name in LIMITS if name in broken)

    def filled(self, counts: Counts, ceilings: Counts, growing: set[int]) -> Counts:
        """Progressive filling: these groups widen together until a limit stops one after the other."""
        width = min(Fraction(counts[group], self.full[group]) for group in growing)
        while growing:
            widths = [width, *self.changes(growing, width)]
            last = self.highest(counts, growing, widths)
            counts = self.raised(counts, growing, widths[last])
            width = widths[min(last + 1, len(widths) - 1)]
            for group in sorted(growing):  # not all of them can reach the next width, but some may
                larger = self.raised(counts, {group}, width)
                counts = counts if self.broken(larger) else larger
                if counts != larger or counts[group] == ceilings[group]:
                    growing.remove(group)
        return counts

    def steps(self, counts: Counts, ceilings: Counts) -> dict[int, Counts]:
        """For each group that is not at its ceiling, the counts with this group one step larger."""
        following = (
            each[bisect_right(each, count) :] for each, count in zip(self.members, counts, strict=True)
        )
        return {
            group: (*counts[:group], larger[0], *counts[group + 1 :])
            for group, larger in enumerate(following)
            if counts[group] < ceilings[group]
        }

    def highest(self, counts: Counts, groups: set[int], widths: list[Fraction]) -> int:
        """The last of the widths that these groups can reach together."""
        return _last(len(widths), lambda index: not self.broken(self.raised(counts, groups, widths[index])))

    def changes(self, groups: set[int], above: Fraction) -> list[Fraction]:
        """The widths above ``above`` at which some of these groups change, up to the ceiling."""
        widths = _widths(frozenset(self.full[group] for group in groups))
        return [*widths[bisect_right(widths, above) : bisect_left(widths, self.ceiling)], self.ceiling]

    def raised(self, counts: Counts, groups: set[int], width: Fraction) -> Counts:
        """These groups at a width, the others as they are."""
        wanted = self.counts(width)
        return tuple(
            max(count, wanted[group]) if group in groups else count for group, count in enumerate(counts)
        )

    def refuse_smallest(self, counts: Counts) -> None:
        """Raise where even these counts break a limit: the one that is missed by the largest factor."""
        missed = self.broken(counts)
        if not missed:
            return
        costs = self.costs
        needed = {name: costs.measure(name, counts, self.workload) for name in missed}
        name = max(missed, key=lambda name: needed[name] / self.allowed[name])
        limit, allowed = self.limits[name], self.allowed[name]
        written = limit_text(name, limit)
        meant = f" (that is {amount(name, allowed)})" if isinstance(limit, Fraction) else ""
        others = [f"{other} too" for other in missed if other != name]
        raise BudgetError(
            name, allowed, needed[name],
            f"no cut fits: {name} is limited to {written}{meant}, but the smallest cut of this model needs "
            f"{amount(name, needed[name])}, {float(needed[name] / allowed):.3g} times as much (the full model: "
            f"{amount(name, self.whole.measure(name, costs.full, self.workload))})"
            + (f"; it breaks {', '.join(others)}" if others else ""),
        )  # fmt: skip


def _last(count: int, fits: Callable[[int], bool]) -> int:
    """The last index that fits, where 0 is known to and fitting ends once; halving needs few questions."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _cost_limits(budget: Budget) -> dict[str, Limit]:
    """The limits on what a cut costs; the others say how it is made."""
    return {name: limit for name, limit in budget.limits.items() if name not in NOT_COSTS}


def absolute_limits(
    costs: ModelCosts, budget: Budget, workload: Workload | None = None
) -> dict[str, int | Fraction]:
    """The limits on cost as absolute numbers: shares are shares of what the full model costs."""
    return {
        name: limit * costs.measure(name, costs.full, workload) if isinstance(limit, Fraction) else limit
        for name, limit in _cost_limits(budget).items()
    }


def broken_limits(
    costs: ModelCosts, cut: Cut, budget: Budget, workload: Workload | None = None
) -> tuple[str, ...]:
    """The limits on cost that a cut breaks; width, depth and density say how cuts are made, not what they cost."""
    allowed = absolute_limits(costs, budget, workload)
    return tuple(name for name, limit in allowed.items() if costs.of_limit(name, cut, workload) > limit)


def meets(costs: ModelCosts, cut: Cut, budget: Budget, workload: Workload | None = None) -> bool:
    """Whether a cut stays within the budget's limits on cost."""
    return not broken_limits(costs, cut, budget, workload)


def fit_among(
    costs: ModelCosts, budget: Budget, widths: Sequence[Fraction], cut_at: Callable[[Fraction], Cut]
) -> Cut:
    """The cut of the largest of some widths (ascending) that the budget allows, for methods that train no others."""
    for width in reversed(widths):
        cut = cut_at(width)
        if (budget.width is None or width <= Fraction(budget.width)) and meets(costs, cut, budget):
            return cut
    least = costs.of(cut_at(widths[0]))
    raise TooSmallError(
        f"{budget}: no width of method.widths fits it; the smallest is {widths[0]}, with {least.macs:,} MACs and "
        f"{least.params:,} parameters"
    )


def check_honoured(budget: Budget, honours: frozenset[str] | None, method: str) -> None:
    """Refuse a budget with limits that a method does not keep to; ``None`` honours nothing and says so."""
    ignored = [name for name in budget.limits if honours is not None and name not in honours]
    if ignored:
        kept_to = ", ".join(name for name in LIMITS if name in (honours or ()))
        raise FedtailorError(
            f"{method or 'this method'} does not keep to a limit on {' or '.join(ignored)} ({budget}); "
            f"it honours {kept_to}; method.name = 'auto' takes one that keeps to the limits of a fleet"
        )


def distinct_widths(groups: ChannelGroups) -> list[Fraction]:
    """Every width at which some group changes its number of units, ascending."""
    return list(_widths(frozenset(groups.counts[group] for group in groups.elastic)))


@lru_cache(maxsize=256)
def _widths(sizes: frozenset[int]) -> tuple[Fraction, ...]:
    return tuple(sorted({Fraction(count, size) for size in sizes for count in range(1, size + 1)}))
