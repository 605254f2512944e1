"""How fast coordinates with few holders move: their mean is one of few clients, and as noisy as that.

    v_i[c]  <-  w[c] + s[c]^power (v_i[c] - w[c]),      s[c] = sum of weights of the holders of c / sum of all weights

Power 0 moves every coordinate as far as its holders do, power 1 as if all others had sent back what they were given.
What everyone sent keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Where, gather
from fedtailor.elasticity.model import ElasticModel
from fedtailor.merging.holders import add_at
from fedtailor.messages import Update


def slowed(
    weights: Mapping[str, Tensor],
    updates: Sequence[Update],
    model: ElasticModel,
    weight: Callable[[Update], float],
    power: float,
) -> list[Update]:
    """The updates, with trained coordinates of few holders drawn back to where they came from."""
    ordered = sorted((update for update in updates if weight(update) > 0), key=lambda update: update.client)
    total = sum(
        map(weight, ordered)
    )  # in the order of ``_held``, so that it is exactly what all together weigh
    held = {
        name: _held(name, weights[name], ordered, model, weight)
        for name in {name for update in ordered for name in update.patch.values} & weights.keys()
        if plain(name) in model.trainable
    }
    rates = {name: torch.where(value == total, 1.0, (value / total) ** power) for name, value in held.items()}
    return [_drawn_back(update, weights, rates, model) for update in updates]


def _held(
    name: str,
    old: Tensor,
    updates: Sequence[Update],
    model: ElasticModel,
    weight: Callable[[Update], float],
) -> Tensor:
    """Of every coordinate, how much its holders weigh together."""
    held = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
    for update in updates:
        if name in update.patch.values:
            add_at(held, model.table(update.patch.cut).get(name), weight(update))
    return held


def _drawn_back(
    update: Update, weights: Mapping[str, Tensor], rates: Mapping[str, Tensor], model: ElasticModel
) -> Update:
    table, values = model.table(update.patch.cut), dict(update.patch.values)
    for name in values.keys() & rates.keys():
        where = table.get(name)
        old, rate = _part(weights[name], where), _part(rates[name], where)
        moved = old.double() + rate * (values[name].double() - old.double())
        values[name] = torch.where(rate == 1, values[name], moved.to(values[name].dtype))
    return replace(update, patch=replace(update.patch, values=values))


def _part(value: Tensor, where: Where | None) -> Tensor:
    return value if where is None else gather(value, where)
