"""What a device can afford, and the largest cut that fits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from fedtailor.elastic.cost import Cost
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.groups import ChannelGroups
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.selections import WidthLike, as_width, kept, prefix
from fedtailor.errors import FedtailorError, require

Limit = int | Fraction    # an absolute number, or a share of the full model


@dataclass(frozen=True)
class Budget:
    """The limits of a device; several may hold at once.

    ``width`` is a share of every layer's channels. ``macs``, ``params`` and ``bytes`` are absolute when they are whole
    numbers above one, and shares of the full model when they lie between 0 and 1.

    >>> Budget(width="1/4")
    Budget(width=1/4)
    >>> Budget(macs=0.5, params=100_000)
    Budget(macs=1/2, params=100000)
    """

    width: WidthLike | None = None
    macs: WidthLike | None = None
    params: WidthLike | None = None
    bytes: WidthLike | None = None

    def __post_init__(self) -> None:
        if self.width is not None:
            object.__setattr__(self, "width", as_width(self.width))
        for name in ("macs", "params", "bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _as_limit(getattr(self, name), name))

    @property
    def limits(self) -> dict[str, Limit]:
        """The limits that are set, by name, in their exact form."""
        return {item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) is not None}

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{name}={limit}' for name, limit in self.limits.items())})"


def _as_limit(value: Any, name: str) -> Limit:
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return value
    if isinstance(value, float) and value > 1 and value.is_integer():
        return int(value)
    try:
        return as_width(value, name)
    except FedtailorError:
        raise FedtailorError(
            f"{name} = {value!r}: expected a whole number above 1, or a share of the full model above 0 and at most 1"
        ) from None


def fit(model: ElasticModel, budget: Budget, align: int = 1) -> Cut:
    """The widest prefix cut that meets every limit of the budget."""
    ceiling = Fraction(budget.width) if budget.width is not None else Fraction(1)
    limits = {name: limit for name, limit in budget.limits.items() if name != "width"}
    require(align >= 1, "align", align, "a whole number of at least 1")
    if not limits:
        return prefix(model.groups, ceiling, align)
    full = model.cost(Cut.everything())
    widths = [width for width in distinct_widths(model.groups) if width <= ceiling] or [ceiling]
    if _broken(model.cost(prefix(model.groups, widths[0], align)), full, limits):
        raise FedtailorError(_too_small(model.cost(prefix(model.groups, widths[0], align)), full, limits))
    low, high = 0, len(widths)    # widths[low] fits, widths[high] does not; cost grows with width
    while high - low > 1:
        middle = (low + high) // 2
        fits = not _broken(model.cost(prefix(model.groups, widths[middle], align)), full, limits)
        low, high = (middle, high) if fits else (low, middle)
    return prefix(model.groups, widths[low], align)


def meets(model: ElasticModel, cut: Cut, budget: Budget) -> bool:
    """Whether a cut stays within the budget's limits on cost; ``width`` says how cuts are made, not what they cost."""
    limits = {name: limit for name, limit in budget.limits.items() if name != "width"}
    return not limits or not _broken(model.cost(cut), model.cost(Cut.everything()), limits)


def distinct_widths(groups: ChannelGroups) -> list[Fraction]:
    """Every width at which some group changes its number of units, ascending."""
    sizes = {groups.widths[group] for group in groups.elastic}
    return sorted({Fraction(count, size) for size in sizes for count in range(1, size + 1)})


def _broken(cost: Cost, full: Cost, limits: dict[str, Limit]) -> list[str]:
    return [name for name, limit in limits.items() if getattr(cost, name) > _absolute(limit, getattr(full, name))]


def _absolute(limit: Limit, full: int) -> Fraction | int:
    return limit * full if isinstance(limit, Fraction) else limit


def _too_small(smallest: Cost, full: Cost, limits: dict[str, Limit]) -> str:
    name = _broken(smallest, full, limits)[0]
    allowed, needed = _absolute(limits[name], getattr(full, name)), getattr(smallest, name)
    return (
        f"budget {name} = {limits[name]} allows {float(allowed):,.0f}, but the smallest cut of this model needs "
        f"{needed:,} ({name} of the full model: {getattr(full, name):,})"
    )


def width_of(cut: Cut, groups: ChannelGroups) -> Fraction:
    """The width by which a prefix cut was made; for other cuts, the mean share of units that it keeps."""
    if cut.tag and all(isinstance(units, range) for units in cut.channels.values()):
        try:
            width = Fraction(cut.tag)
        except ValueError:
            width = Fraction(0)
        if width and all(cut.width(g, groups.widths[g]) >= kept(width, groups.widths[g]) for g in groups.elastic):
            return width
    total = sum(groups.widths[group] for group in groups.elastic)
    return Fraction(sum(cut.width(group, groups.widths[group]) for group in groups.elastic), total)
