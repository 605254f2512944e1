"""A traced model in words: what shrinks together, what cannot shrink and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fedtailor.elasticity.costing.model_costs import ModelCosts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import ending
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.running.exits import exits_of
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.elasticity.running.shortening import chains_of

SHOWN = 3  # tensors named for each group, and groups that would let more of the model shrink
GOOD = 0.9  # share of the parameters: what is below is a finding

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
    parts = [
        _summary(costs), _elastic(model), _fixed(model.groups), _chains(model), _exits(costs), _finding(model),
        _shared(model.groups), _pieces(model),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def elastic_share(model: Pieces) -> float:
    """The share of parameters that some cut leaves out."""
    return model.groups.elastic_share(model.parameters)


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
        + (f"\n{model.timing}" if model.timing else "")
    )


def gains(model: Pieces) -> dict[str, float]:
    """How much of the model each group that cannot shrink would add to the share if it could, most first."""
    groups, share, found = model.groups, elastic_share(model), dict[str, float]()
    for group in groups.fixed:
        others = {name: reason for name, reason in groups.fixed.items() if name != group}
        found[group] = replace(groups, fixed=others).elastic_share(model.parameters) - share
    return {
        group: found[group] for group in sorted(found, key=lambda group: -found[group]) if found[group] > 0
    }


def remedy(reason: str) -> str:
    """What would let channels shrink that cannot for this reason."""
    return next((help for words, help in _REMEDIES if words in reason), _ELSE)


def _finding(model: Pieces) -> str:
    """Where little can shrink: which groups hold most of the rest, why they do not, and what would help."""
    share = elastic_share(model)
    if share >= GOOD:
        return ""
    lines = [f"finding: {share:.1%} of the parameters can shrink, less than {GOOD:.0%}. What would raise it"]
    for group, gain in list(gains(model).items())[:SHOWN]:
        reason = model.groups.fixed[group]
        lines.append(f"  {group} (+{gain:.1%}): {reason} ({remedy(reason)})")
    return "\n".join(lines) if len(lines) > 1 else ""


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


def _chains(model: Pieces) -> str:
    """The blocks of which a piece may run fewer."""
    rows = [("chain", "blocks", "may be left out", "from", "to")]
    for chain in chains_of(model):
        counts = str(len(chain.blocks)), str(len(chain.spare))
        rows.append((chain.name or "(the module)", *counts, chain.blocks[0], chain.blocks[-1]))
    return "chains of blocks\n" + _table(rows) if len(rows) > 1 else ""


def _exits(costs: ModelCosts) -> str:
    """Where networks may end, and what each of them costs."""
    exits = exits_of(costs.pieces.module)
    if len(exits) == 1:
        return ""
    rows = [("exit", "depth", "parameters", "multiply-accumulates")]
    for each in exits:
        cost = costs.of(ending(Cut.everything(), each))
        rows.append((each.name, str(each.depth), f"{cost.params:,}", f"{cost.macs:,}"))
    return "exits\n" + _table(rows)


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
