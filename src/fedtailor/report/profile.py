"""What a network costs at every width, and the piece of it that fits a budget: as data, and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.elasticity.costing.budget import Budget, amount, limit_text
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import (
    BudgetError,
    Family,
    Fit,
    absolute_limits,
    broken_limits,
    fit_with_reason,
)
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.model import ElasticModel

TENTHS = tuple(Fraction(number, 10) for number in range(1, 11))
COSTS = ("params", "macs", "bytes", "memory", "step_time")
BAR = 8  # characters of a full bar


@dataclass(frozen=True)
class CurveRow:
    """One point of the cost curve."""

    width: Fraction
    cost: Cost
    broken: tuple[str, ...]  # the limits of the budget that this width breaks
    load: float  # the largest share of a limit that it takes; without limits, its share of the full model's MACs


@dataclass(frozen=True)
class Profile:
    """The cost curve of a model and, where there is a budget, the cut that fits it."""

    rows: tuple[CurveRow, ...]
    budget: Budget
    allowed: dict[str, int | Fraction]  # the limits on cost as absolute numbers
    workload: Workload  # the training step that memory and step time speak of
    fitted: Fit | None  # None: no budget was given, or nothing fits
    width: Fraction | None  # of the fitted cut; the mean share of channels where groups differ
    channels: dict[str, tuple[int, int]]  # of the fitted cut: kept and all units of each group
    refusal: str  # why nothing fits; empty otherwise

    def as_data(self) -> dict[str, Any]:
        """Everything as plain numbers and strings, for JSON."""
        fitted = None
        if self.fitted is not None and self.width is not None:
            fitted = {
                "width": str(self.width),
                **_costs(self.fitted.cost),
                "binding": list(self.fitted.binding),
                "channels": {group: list(pair) for group, pair in self.channels.items()},
            }
        return {
            "curve": [
                {"width": str(row.width), **_costs(row.cost), "breaks": list(row.broken)} for row in self.rows
            ],
            "limits": {name: limit_text(name, limit) for name, limit in self.budget.limits.items()},
            "allowed": {name: float(limit) for name, limit in self.allowed.items()},
            "batch_size": self.workload.batch_size,
            "optimiser_slots": self.workload.optimiser_slots,
            "fitted": fitted,
            "refusal": self.refusal or None,
        }


def profile(
    model: ElasticModel,
    budget: Budget | None = None,
    *,
    widths: Sequence[Fraction] = TENTHS,
    align: int = 1,
    family: Family = "uniform",
    workload: Workload | None = None,
    timed: bool = False,
) -> Profile:
    """The cost curve at ``widths``, and what fits ``budget``; ``timed`` also measures training steps, which is slow."""
    budget, workload = budget or Budget(), workload or Workload()
    allowed = absolute_limits(model.costs, budget, workload)
    timed = timed or "step_time" in allowed
    rows = []
    for width in widths:
        cut = prefix(model.groups, width, align)
        cost = _cost(model, cut, workload, timed)
        rows.append(
            CurveRow(width, cost, _broken(model, cut, width, budget, workload), _load(model, cost, allowed))
        )
    fitted, refusal = None, ""
    if budget.limits:
        try:
            fitted = fit_with_reason(model.costs, budget, align, family=family, workload=workload)
        except BudgetError as error:
            refusal = str(error)
    known = model.groups.counts
    return Profile(
        rows=tuple(rows),
        budget=budget,
        allowed=allowed,
        workload=workload,
        fitted=replace(fitted, cost=_cost(model, fitted.cut, workload, timed)) if fitted else None,
        width=fitted.cut.share(model.groups) if fitted else None,
        channels={g: (fitted.cut.count(g, known[g]), known[g]) for g in model.groups.elastic}
        if fitted
        else {},
        refusal=refusal,
    )


def _cost(model: ElasticModel, cut: Cut, workload: Workload, timed: bool) -> Cost:
    cost = model.cost(cut, workload)
    if not timed:
        return cost
    return replace(cost, step_time=model.costs.measure("step_time", model.costs.counts(cut), workload))


def _broken(
    model: ElasticModel, cut: Cut, width: Fraction, budget: Budget, workload: Workload
) -> tuple[str, ...]:
    too_wide = ("width",) if budget.width is not None and width > Fraction(budget.width) else ()
    return (*too_wide, *broken_limits(model.costs, cut, budget, workload))


def _load(model: ElasticModel, cost: Cost, allowed: dict[str, int | Fraction]) -> float:
    if not allowed:
        return cost.macs / max(1, model.costs.measure("macs", model.costs.full))
    return max(float(_value(cost, name) / limit) for name, limit in allowed.items())


def _value(cost: Cost, name: str) -> int:
    value = getattr(cost, "training_memory" if name == "memory" else name)
    return 0 if value is None else int(value)


def _costs(cost: Cost) -> dict[str, int]:
    named = {name: getattr(cost, "training_memory" if name == "memory" else name) for name in COSTS}
    return {name: value for name, value in named.items() if value is not None}


def profile_view(result: Profile, title: str = "") -> RenderableType:
    """The profile for the terminal: a table with a bar per width, the fitted cut and what binds it."""
    shown = [name for name in COSTS if name in _costs(result.rows[0].cost)]
    heads = {"macs": "MACs", "memory": "memory*", "step_time": "step time"}
    table = plain_table(room=1)
    table.add_column("width", justify="right", no_wrap=True)
    for name in shown:
        table.add_column(heads.get(name, name), justify="right", no_wrap=True)
    table.add_column("of the limits" if result.allowed else "of the full MACs", no_wrap=True)
    if result.budget.limits:
        table.add_column("breaks", min_width=9)
    for row in result.rows:
        cells = [amount(name, _value(row.cost, name)) for name in shown]
        broken = [", ".join(row.broken)] if result.budget.limits else []
        style = "dim" if row.broken else ""
        table.add_row(_decimal(row.width), *cells, _bar(row.load), *broken, style=style)
    step = f"batches of {result.workload.batch_size}"
    if result.workload.optimiser_slots:
        step += f", {result.workload.optimiser_slots} number(s) of optimiser state per parameter"
    note = f"* estimated for training on {step}"
    return Group(Titled(title, table, note), *_verdict(result))


def _bar(load: float) -> str:
    """A bar that is full at the limit, with the share behind it."""
    filled = min(BAR, round(BAR * load))
    share = f"{100 * load:.3g} %" if load < 10 else "over 10x"
    return f"{'█' * filled}{'·' * (BAR - filled)} {share}"


def _verdict(result: Profile) -> list[Text]:
    if result.refusal:
        return [Text(result.refusal, style="bold red")]
    if result.fitted is None or result.width is None:
        return []
    parts = []
    for name in COSTS:
        if name in result.allowed:
            used, limit = _value(result.fitted.cost, name), result.allowed[name]
            parts.append(
                f"{name} {amount(name, used)} ({float(100 * used / limit):.3g} % of {amount(name, limit)})"
            )
    uniform = len({Fraction(*pair) for pair in result.channels.values()}) == 1
    width = _decimal(result.width)
    lines = [Text(f"fits: width {width}" + (f": {', '.join(parts)}" if parts else ""), style="bold green")]
    if not uniform:
        kept = ", ".join(f"{group} {kept}/{full}" for group, (kept, full) in result.channels.items())
        lines.append(Text(f"channels: {kept}"))
    binding = result.fitted.binding
    if binding:
        lines.append(Text(f"binding limit: {', '.join(binding)} (the next larger cut breaks it)"))
    else:
        lines.append(Text("no limit binds: the full model fits"))
    return lines


def _decimal(width: Fraction) -> str:
    """0.2 where that is exact, 47/512 (0.0918) where it is not."""
    text = f"{float(width):.6g}"
    return text if Fraction(text) == width else f"{width} ({float(width):.3g})"
