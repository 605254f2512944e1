"""Pruning by magnitude: which weights survive once more. Pure functions; ties are broken by the weights' order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedtailor.elasticity.costing.fitting import distinct_widths
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require

MATRICES = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.MultiheadAttention)


def prunable(model: ElasticModel) -> tuple[str, ...]:
    """The tensors whose weights may be left out: trained matrices of layers, not biases, norms or embeddings."""
    found = dict.fromkeys(
        f"{path}.{name}".removeprefix(".")
        for path, layer in model.module.named_modules()
        if isinstance(layer, MATRICES)
        for name, value in layer.named_parameters(recurse=False)
        if "weight" in name and value.dim() > 1
    )
    first_names = dict.fromkeys(model.groups.ties.get(name, name) for name in found)
    return tuple(name for name in first_names if name in model.trainable)


def unpruned(weights: Mapping[str, Tensor], names: Sequence[str]) -> Levels:
    """The map in which nothing has been left out."""
    require(len(names) > 0, "prunable tensors", list(names), "at least one linear or convolution layer")
    return Levels({name: torch.zeros_like(weights[name], dtype=torch.uint8) for name in names})


def prune(
    weights: Mapping[str, Tensor], levels: Levels, depth: int, ratio: Fraction, *, layerwise: bool = False
) -> Levels:
    """The map with one mask more, inside mask ``depth``: exactly ``round(ratio * N)`` of all N weights are in it.

    The largest magnitudes survive, of all tensors together or of each tensor by itself.
    """
    sizes = [each.numel() for each in levels.maps.values()]
    total = round(ratio * sum(sizes))
    held = [levels.count(name, depth) for name in levels.maps]
    require(total <= sum(held), "ratio", str(ratio), "at most as many weights as the mask before it keeps")
    scores = {name: _scores(weights[name], each, depth) for name, each in levels.maps.items()}
    if layerwise:
        counts = apportion(total, [ratio * size for size in sizes], held)
        kept = [largest(score, count) for score, count in zip(scores.values(), counts, strict=True)]
    else:
        kept = list(largest(torch.cat(list(scores.values())), total).split(sizes))
    pairs = zip(levels.maps.items(), kept, strict=True)
    return replace(levels, maps={name: each + chosen.view_as(each) for (name, each), chosen in pairs})


def _scores(weight: Tensor, levels: Tensor, depth: int) -> Tensor:
    """Magnitudes in one row; what is outside the mask already comes after everything that is in it."""
    return weight.detach().abs().masked_fill_(levels < depth, -1).reshape(-1)


def largest(scores: Tensor, count: int) -> Tensor:
    """True for exactly ``count`` scores, none of which is smaller than one that is left out; of equals the first."""
    chosen = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    if count == 0:
        return chosen
    values = scores.cpu().numpy()
    edge = values.min()
    above = values[values > edge]  # a partition of millions of equal scores is slow
    if count <= len(above):
        edge = np.partition(above, len(above) - count)[len(above) - count]
    edge = float(edge)
    chosen |= scores > edge
    ties = (scores == edge).nonzero().reshape(-1)
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen


def apportion(total: int, quotas: Sequence[Fraction], limits: Sequence[int]) -> list[int]:
    """Whole numbers near the quotas that add to ``total``: largest remainders first, none above its limit.

    >>> apportion(5, [Fraction(5, 4), Fraction(5, 2), Fraction(5, 4)], [9, 9, 9])
    [1, 3, 1]
    """
    counts = [min(int(quota), limit) for quota, limit in zip(quotas, limits, strict=True)]
    while sum(counts) < total:
        room = [place for place, limit in enumerate(limits) if counts[place] < limit]
        counts[max(room, key=lambda place: (quotas[place] - counts[place], -place))] += 1
    return counts


def rewind(weights: Mapping[str, Tensor], model: ElasticModel, levels: Levels, level: int) -> Weights:
    """Trained parameters that survived so far as they were before training; what was pruned keeps its value."""
    rewound, initial = dict(weights), model.weights()
    for name in model.trainable:
        if name in levels.maps:
            rewound[name] = torch.where(levels.maps[name] >= level, initial[name], weights[name])
        else:
            rewound[name] = initial[name]
    return rewound


def requirements(ratios: Sequence[Fraction], model: ElasticModel) -> dict[str, list[str]]:
    """The least width, parameters and density that pay for each ratio, as exact text.

    A width pays for as many weights as a network of that width has.
    """
    full = model.costs.measure("params", model.costs.full)
    weights = sum(prod(model.shape(name, Cut.everything())) for name in prunable(model))
    params = [full - weights + round(ratio * weights) for ratio in ratios]
    widths = distinct_widths(model.groups) or [Fraction(1)]

    def held(width: Fraction) -> int:
        return model.costs.measure("params", model.costs.counts(prefix(model.groups, width)))

    least = [widths[min(bisect_left(widths, need, key=held), len(widths) - 1)] for need in params]
    return {
        "params": [str(need) for need in params],
        "width": [str(width) for width in least],
        "density": [str(ratio) for ratio in ratios],
    }
