"""What a report wants to know and no computation reads: who trained which units, and what a method wants to show.

setup.json     written once: tiers and their members, data of each client, axes of every weight
notes.jsonl    one line per round: {"round", "cuts", "method", "deployed"}

``cuts`` counts equal cuts: units of each group as text (``0-15,20``), groups that are held whole are left out. Weights
with a tag of their own (``conv1.weight@base3``) are counted by tag. ``method`` is what the method's ``notes`` returned;
``deployed``, in rounds with an evaluation, what a prediction costs with the network that each tier is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedtailor.data import picture
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.cutting.encoding import units_value
from fedtailor.elasticity.cutting.names import is_tagged, tag_of
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import Fleet, Tier
from fedtailor.messages import ServerState, Update
from fedtailor.method import Method
from fedtailor.seeds import Seeds

MOST_CLIENTS = 200  # whose data and tier are described one by one


def round_notes(
    method: Method,
    state: ServerState,
    updates: Sequence[Update],
    model: ElasticModel,
    tiers: Sequence[Tier] = (),
) -> dict[str, Any]:
    """The line of one round; ``state`` is the one after it, ``tiers`` are those that were evaluated."""
    counted: Counter[tuple[tuple[tuple[str, int | str], ...], tuple[str, ...]]] = Counter()
    for update in updates:
        channels = tuple((group, units_value(units)) for group, units in update.patch.cut.key)
        weights = [name for name, value in update.patch.values.items() if value.dim() >= 2]
        tags = sorted({tag_of(name) for name in weights if is_tagged(name)})
        counted[channels, tuple(tags)] += 1
    cuts = [
        {"count": count, "channels": dict(channels), "tags": list(tags)}
        for (channels, tags), count in sorted(counted.items(), key=repr)
    ]
    own = dict(method.notes(state, updates, model))
    deployed = {tier.name: _deployed(method, state, tier, model) for tier in tiers}
    line = {"round": state.round, "cuts": cuts, "method": own, "deployed": deployed}
    return {key: value for key, value in line.items() if value or key in ("round", "cuts")}


def _deployed(method: Method, state: ServerState, tier: Tier, model: ElasticModel) -> dict[str, int]:
    costs = [model.cost(patch.cut) for patch in method.deploy(state, tier.budget, model).patches]
    return {"params": sum(cost.params for cost in costs), "macs": sum(cost.macs for cost in costs)}


def describe_setup(
    method: Method, model: ElasticModel, data: FederatedData, fleet: Fleet, seeds: Seeds, start: ServerState
) -> dict[str, Any]:
    """What a run starts from, as far as a report shows it."""
    tiers = []
    for tier, clients in zip(fleet.tiers, fleet.counts(data.num_clients), strict=True):
        cut = method.cut_for(start, tier.budget, model)
        cost = model.cost(cut)
        width = None if tier.budget.width is None else float(tier.budget.width)
        budget = str(tier.budget)
        tiers.append(
            {
                "name": tier.name,
                "clients": int(clients),
                "width": width,
                "budget": budget,
                "params": cost.params,
                "macs": cost.macs,
            }
        )
    weights = {name: value for name, value in model.weights().items() if value.dim() >= 2}
    layers = {
        name: [
            {"length": e.length, "axes": [[a.group, a.offset, a.repeat, a.blocks, a.stride] for a in e.axes]}
            for e in model.groups.extents[name][:2]
        ]
        for name in weights
        if name in model.groups.extents
    }
    members = [] if fleet.dynamic else fleet.capacity(data.sizes, 0, seeds)[:MOST_CLIENTS]
    return {
        "tiers": tiers,
        "members": {str(client.id): client.tier for client in members},
        "data": {**picture.overview(data), "rows": picture.rows(data, MOST_CLIENTS)},
        "groups": dict(model.groups.counts),
        "layers": layers,
    }
