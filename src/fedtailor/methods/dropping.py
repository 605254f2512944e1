"""What methods share that drop units at random: the draw, where dropped units are made up for, how training stays calm.

Symbols: p = the probability with which a unit is kept, b = 1 where it was drawn. FedDrop's code (the predecessor of
Liao et al., "Adaptive Channel Sparsity for Federated Learning under System Heterogeneity", CVPR 2023) has three parts
that belong together: outputs times b / p, gradients of filters times p, and a start that is sqrt(p) times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.unit_vectors import Place, Vector
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights

Scaling = Literal["none", "train", "eval", "layer"]
SCALINGS = ("none", "train", "eval")


def draw_active(
    groups: ChannelGroups,
    probabilities: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]],
    generator: np.random.Generator,
) -> Cut:
    """One Bernoulli draw per unit; a group with fewer units than it needs keeps those that were closest to staying."""
    channels = {}
    for group, probability in probabilities.items():
        margin = generator.random(len(probability)) - probability
        active = int((margin < 0).sum())
        count = groups.constraint(group).round_up(active, of=len(probability))
        channels[group] = np.sort(np.argsort(margin, kind="stable")[:count]).tolist()
    return Cut.of(groups, channels)


def scaled_behind(patch: Patch, shares: Vector, model: ElasticModel) -> Patch:
    """The piece for evaluation: whatever reads a unit is multiplied by the share of steps in which it was there."""
    values = torch.from_numpy(shares)
    like = next((value for value in patch.values.values() if value.is_floating_point()), values)
    return Patch(model.units.gated(patch.values, values.to(like), patch.cut), patch.cut)


class _Slowed(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        # Not view_as: with the stride that it gives a single filter, PyTorch cannot differentiate a single example.
        return value.expand_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


def slowed(
    weights: Mapping[str, Tensor], probabilities: Vector, cut: Cut, model: ElasticModel
) -> dict[str, Tensor]:
    """The same weights, the gradient of each filter multiplied by the probability p of the unit that it makes.

    A filter is drawn with probability p and its output divided by p: the mean of its gradient over draws is that of a
    dense step, its variance (1 - p) / p times the square of that. The factor makes the mean p, the variance p^2 times
    as large: filters of small clients move less, and no single step far.
    """
    vector = torch.from_numpy(probabilities)
    factors = {name: on_filter(vector.to(value), name, cut, model) for name, value in weights.items()}
    return {
        name: value if factors[name] is None else _Slowed.apply(value, factors[name])  # type: ignore[no-untyped-call]
        for name, value in weights.items()
    }


def on_filter(values: Tensor, name: str, cut: Cut, model: ElasticModel) -> Tensor | None:
    """The values of the units that a weight or bias makes, shaped like it; None where it makes none."""
    place = filters(model).get(name)
    if place is None:
        return None
    shape = [1] * len(model.groups.extents[name])
    shape[place.dim] = -1
    return model.units.along(values, place, cut).view(shape)


def filters(model: ElasticModel) -> dict[str, Place]:
    """Of every weight and bias of a layer that makes units, the axis on which these lie."""

    def found() -> dict[str, Place]:
        owned = [name for name in model.parameters if name.rpartition(".")[0] in model.groups.producers]
        made = {name: model.units.made_by(name) for name in owned}
        return {name: place for name, place in made.items() if place is not None}

    return model.once(("filters",), found)


def started(weights: Weights, probability: float, model: ElasticModel) -> Weights:
    """The weights of layers that make or read drawn units, scaled to the deviation sqrt(2 p / fan) each.

    That is He's start, and FedDrop's bound sqrt(6 p / fan) where values are uniform, times sqrt(p): a sum of units that
    are there with probability p and divided by p has 1 / p times the second moment, and so keeps that of its inputs.
    """
    reading = {place.tensor for place in model.units.reads}
    scaled = dict(weights)
    for path, layer in model.module.named_modules():
        name = f"{path}.weight".removeprefix(".")
        if not isinstance(layer, nn.Linear | _ConvNd) or name not in scaled:
            continue
        if name in reading or model.units.made_by(name) is not None:
            value, fan = scaled[name], nn.init._calculate_correct_fan(layer.weight, "fan_in")
            deviation = float(value.double().std(correction=0))
            if deviation > 0:
                scaled[name] = value * (math.sqrt(2 * probability / fan) / deviation)
    return scaled
