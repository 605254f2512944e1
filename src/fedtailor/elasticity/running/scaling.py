"""What the outputs of a narrow network are multiplied by in training, and how the same is folded into its weights.

A network that was trained with factors on its layers' outputs is another function without them. What is evaluated,
calibrated and deployed is therefore the piece with the factors folded in: (f W) x + f b = f (W x + b).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.running.norm import NormPolicy
from fedtailor.elasticity.running.pieces import Pieces

LINEAR_IN_WEIGHTS = (nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag)


def scaler(model: Pieces, cut: Cut, policy: NormPolicy, whole: Fraction = Fraction(1)) -> dict[str, float]:
    """The factor 1 / s for every layer whose output shrinks; the classifier, whose output is fixed, keeps its own.

    s is the cut's share of ``whole``, the width of the network that it stands for.

    In front of a batch norm the factor cancels out in training. It would only spoil running statistics that are
    tracked there, so it is left out where the policy tracks them. Layers into whose weights no factor can be folded
    (recurrent ones, and those that share a tensor) are not scaled either.
    """
    factor = 1 / float(cut.share(model.groups) / whole)
    if factor == 1 or (model.statistics and not policy.measured_after):
        return {}
    shrinking = frozenset(cut.channels)
    # Every step of a client asks, and is given the same object
    return model.once(("scaler", factor, shrinking), lambda: _factors(model, factor, shrinking))


def _factors(model: Pieces, factor: float, shrinking: frozenset[str]) -> dict[str, float]:
    producers = model.groups.producers
    made = {layer for layer, produced in producers.items() if shrinking & set(produced)}
    return {layer: factor for layer in producers if layer in made and carriers(model, layer)}


def folded(model: Pieces, patch: Patch, factors: Mapping[str, float]) -> Patch:
    """The piece that computes without factors what this one computes with them."""
    values = dict(patch.values)
    for layer, factor in factors.items():
        for name in values.keys() & carriers(model, layer):
            values[name] = values[name] * factor
    return Patch(values, patch.cut)


def carriers(model: Pieces, layer: str) -> tuple[str, ...]:
    """The tensors in which a layer's output is linear: its weight and bias; none where no factor can be folded in."""
    module = model.module.get_submodule(layer)
    if isinstance(module, nn.MultiheadAttention):
        return carriers(model, f"{layer}.out_proj")
    renormed = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    if not isinstance(module, LINEAR_IN_WEIGHTS) or renormed:
        return ()
    own = [f"{layer}.{name}".removeprefix(".") for name, _ in module.named_parameters(recurse=False)]
    shared = {*model.groups.ties, *model.groups.ties.values()}
    shared |= model.constants.keys()  # what is frozen is the module's own, at every width
    plain = f"{layer}.weight".removeprefix(".") in own and not shared & set(own)
    return tuple(own) if plain else ()
