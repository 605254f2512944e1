"""Masks of single weights as factors: how a client trains a network that a mask leaves weights out of."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.layout import Layouts, laid_out
from fedtailor.elasticity.running.pieces import Weights


def mask_factors(networks: Sequence[Cut], model: ElasticModel) -> Weights:
    """Masks as factors, in the memory layout in which the client trains."""
    layout, masks = Layouts(model).at(Cut.everything()), {}
    for cut in networks:
        if (mask := cut.sparse) is None:
            continue
        for name in mask.levels.maps:
            masks[tagged(name, cut.tag)] = mask.of(name).to(model.dtype(name))
    return laid_out(masks, layout)


def masked(weights: Weights, cut: Cut, masks: Weights) -> Weights:
    """The weights of a network: zeros outside its mask, and no gradient there."""
    if cut.sparse is None:
        return weights
    factors = {name: masks[tagged(name, cut.tag)] for name in cut.sparse.levels.maps}
    return {name: value * factors[name] if name in factors else value for name, value in weights.items()}
