"""Magnitude as importance: what a piece keeps, the threshold that this sets, and the gradient that the threshold bends.

A channel's importance is the mean magnitude of the weights and biases that make it; a single weight's its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Mask
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import require
from fedtailor.methods.dropping import filters
from fedtailor.methods.pruning import largest, prunable, prune, unpruned


def density_for(budget: Budget, model: ElasticModel) -> Fraction:
    """The share of prunable weights that a budget pays for: a whole number of them, rounded down.

    A width pays for as many prunable weights as a network of that width has.
    """
    weights = _prunable_weights(model, Cut.everything())
    full = model.costs.measure("params", model.costs.full)
    counts = [weights]
    for name, limit in budget.limits.items():
        if name == "density":
            counts.append(int(limit * weights))
        elif name == "width":
            counts.append(_prunable_weights(model, prefix(model.groups, as_width(limit))))
        else:  # parameters: biases, norms and embeddings belong to every piece
            allowed = int(limit * full) if isinstance(limit, Fraction) else limit
            counts.append(allowed - (full - weights))
    if min(counts) < 1:
        raise TooSmallError(
            f"{budget}: it pays for no single weight beside the {full - weights} parameters that every device holds"
        )
    return Fraction(min(counts), weights)


def _prunable_weights(model: ElasticModel, cut: Cut) -> int:
    names = prunable(model)
    require(len(names) > 0, "prunable tensors", list(names), "at least one linear or convolution layer")
    return sum(prod(model.shape(name, cut)) for name in names)


def mask_of(
    weights: Mapping[str, Tensor], density: Fraction, model: ElasticModel, *, layerwise: bool
) -> Mask:
    """The weights of largest magnitude, of all layers together or of each by itself; ties in the weights' order."""
    return Mask(prune(weights, unpruned(weights, prunable(model)), 0, density, layerwise=layerwise), 1)


def weight_thresholds(packed: Mapping[str, Tensor], mask: Mask, *, layerwise: bool) -> dict[str, Tensor]:
    """theta of every masked tensor: the smallest magnitude that was kept, in all of them or in each."""
    rows = {name: packed[name].abs() for name in mask.levels.maps}
    whole = torch.cat(list(rows.values())).min()
    return {name: row.min() if layerwise and len(row) else whole for name, row in rows.items()}


def importance(weights: Mapping[str, Tensor], cut: Cut, model: ElasticModel) -> Tensor:
    """The importance of every unit at a cut, in one vector; 0 of units that it leaves out. Differentiable."""
    like = next(value for value in weights.values() if value.is_floating_point())
    total = like.new_zeros(model.units.total + 1)  # the last place is that of positions on which no unit lies
    count = torch.zeros_like(total)
    for name, place in filters(model).items():
        if name not in weights:
            continue
        units = model.units.on(place, cut).to(like.device)
        rows = (
            weights[name].abs().movedim(place.dim, 0).reshape(len(units), -1).to(like.dtype)
        )  # unit x weights
        total = total.index_add(0, units, rows.sum(1))
        count = count.index_add(0, units, torch.full_like(units, rows.shape[1], dtype=like.dtype))
    return (total / count.clamp(min=1))[:-1]


def strongest(weights: Mapping[str, Tensor], size: Cut, model: ElasticModel) -> Cut:
    """As many units of every group as ``size`` keeps: those of largest importance, of equals the first."""
    scores = importance(weights, Cut.everything(), model)
    channels = {}
    for group, units in size.channels.items():
        chosen = largest(scores[model.units.slices[group]], len(units))
        channels[group] = chosen.nonzero().flatten().tolist()
    return Cut.of(model.groups, channels, size.tag, size.width, size.absent)


def unit_thresholds(scores: Tensor, cut: Cut, model: ElasticModel) -> Tensor:
    """theta of every unit: the smallest importance that its group holds; 0 in groups that are held whole."""
    thresholds = torch.zeros_like(scores)
    for group, units in cut.channels.items():
        part = model.units.slices[group]
        thresholds[part] = scores[part][list(units)].min()
    return thresholds


class _Gate(torch.autograd.Function):
    """M(a) = 1 where a >= theta and 0 elsewhere, with the slope 2 theta / (a + theta)^2 where it is 1."""

    @staticmethod
    def forward(ctx: Any, importance: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(importance, threshold)
        return (importance >= threshold).to(importance.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        importance, threshold = ctx.saved_tensors
        sloped = (importance >= threshold) & (threshold > 0)  # without a threshold nothing is bent
        slope = torch.where(sloped, 2 * threshold / (importance + threshold).square(), 0)
        return gradients[0] * slope, None


def gate(importance: Tensor, threshold: Tensor) -> Tensor:
    """The paper's M, which lets through what reaches the threshold; its gradient is the threshold-controlled one."""
    passed: Tensor = _Gate.apply(importance, threshold)  # type: ignore[no-untyped-call]
    return passed
