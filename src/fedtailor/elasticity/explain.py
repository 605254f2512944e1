"""A traced model in words: what shrinks together, what cannot shrink and why."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.running.pieces import Pieces

SHOWN = 3  # tensors named for each group
ENOUGH = 0.9  # of the parameters: if fewer are elastic, the report says what would raise it

# What helps, by what the reason of a group that cannot shrink says.
_REMEDIES = (
    ("has the literal size", "write -1, or ask the tensor for its size, where the number stands"),
    ("has no rule", "register a rule with fedtailor.function_rule or fedtailor.layer_rule"),
    ("is kept whole, as", "leave it out of keep"),
    ("is an output of the module", "nothing: outputs never shrink"),
    ("reads the module's input", "nothing: inputs never shrink"),
    ("is the vocabulary of", "nothing: vocabularies never shrink"),
)
_ELSE = "write that step for any number of channels, or register a rule for it with fedtailor.function_rule"


def explain(costs: ModelCosts) -> str:
    """The report behind ``ElasticModel.explain()`` and ``fedtailor profile --explain``."""
    model = costs.pieces
    groups = model.groups
    parts = [
        _summary(costs),
        _elastic(model),
        _fixed(groups),
        _finding(model),
        _shared(groups),
        _pieces(model),
    ]
    return "\n\n".join(part for part in parts if part)


def elastic_share(model: Pieces) -> float:
    """The share of parameters that some cut leaves out."""
    return model.groups.elastic_share(model.parameters)


def whole(model: Pieces) -> dict[str, int]:
    """The groups that keep parameters in every cut, and how many: what fixes them is why the share is not higher."""
    groups = model.groups
    found: dict[str, int] = {}
    for name in model.parameters:
        rigid = groups.rigid(name)
        fixed = [
            axis.group
            for extent in groups.extents[name]
            for axis in extent.axes
            if axis.group in groups.fixed
        ]
        for holder in dict.fromkeys(fixed) if fixed else (name,):
            found[holder] = found.get(holder, 0) + rigid
    return {holder: count for holder, count in sorted(found.items(), key=lambda pair: -pair[1]) if count}


def remedy(reason: str) -> str:
    """What would let channels shrink that cannot for this reason."""
    return next((help for words, help in _REMEDIES if words in reason), _ELSE)


def smallest(groups: ChannelGroups) -> Cut:
    """The cut that keeps as little as the constraints allow."""
    counts = {
        group: groups.constraint(group).round_up(1, of=groups.counts[group]) for group in groups.elastic
    }
    return Cut.of(groups, {group: range(count) for group, count in counts.items()})


def _summary(costs: ModelCosts) -> str:
    model = costs.pieces
    full, least = costs.of(Cut.everything()), costs.of(smallest(model.groups))
    saved = 1 - least.macs / full.macs if full.macs else 0.0
    return (
        f"{type(model.module).__name__}: {full.params:,} parameters, {full.macs:,} multiply-accumulates per example\n"
        f"elastic: {elastic_share(model):.1%} of the parameters, {saved:.1%} of the multiply-accumulates\n"
        f"smallest piece: {least.params:,} parameters, {least.macs:,} multiply-accumulates"
    )


def _finding(model: Pieces) -> str:
    """Why a small part of the parameters is elastic, and what would raise it."""
    if elastic_share(model) >= ENOUGH:
        return ""
    total = sum(prod(model.shape(name, Cut.everything())) for name in model.parameters)
    rows = [("group", "stays in every cut", "why, and what would raise it")]
    for holder, count in list(whole(model).items())[:SHOWN]:
        reason = model.groups.fixed.get(holder, "no rule says which of its axes are channels")
        rows.append((holder, f"{count / max(1, total):.1%}", f"{reason} ({remedy(reason)})"))
    return f"less than {ENOUGH:.0%} of the parameters are elastic\n" + _table(rows)


def _elastic(model: Pieces) -> str:
    groups, total = model.groups, sum(prod(model.shape(name, Cut.everything())) for name in model.parameters)
    rows = [("group", "channels", "units", "parameters", "lies on")]
    for group in groups.elastic:
        touched = 0
        for name in model.parameters:
            extents = groups.extents[name]
            touched += prod(extent.length for extent in extents) - groups.rigid(name, group)
        units = str(groups.counts[group])
        constraint = groups.constraint(group)
        units += f" (at least {constraint.minimum})" if constraint.minimum > 1 else ""
        units += f" (multiples of {constraint.multiple})" if constraint.multiple > 1 else ""
        channels = groups.counts[group] * groups.channels_per_unit(group)
        rows.append((group, str(channels), units, f"{touched / max(1, total):.1%}", _places(groups, group)))
    return "can shrink\n" + _table(rows)


def _places(groups: ChannelGroups, group: str) -> str:
    places = [f"{tensor}[{dim}]" for tensor, dim in groups.tensors(group)]
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(places[:SHOWN]) + more


def _fixed(groups: ChannelGroups) -> str:
    rows = [("group", "channels", "why not")]
    for group, reason in groups.fixed.items():
        channels = groups.counts[group] * groups.channels_per_unit(group)
        rows.append((group, str(channels), reason))
    return "cannot shrink\n" + _table(rows) if len(rows) > 1 else ""


def _shared(groups: ChannelGroups) -> str:
    lines = [f"  {second} is {first}" for second, first in groups.ties.items()]
    return "shared tensors\n" + "\n".join(lines) if lines else ""


def _pieces(model: Pieces) -> str:
    lines = [f"pieces are of class {type(model.module).__name__}"] if model.own_class else []
    return "\n".join([*lines, *model.remarks])


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)
