"""Steps of several networks inside one another: how far each coordinate moves.

A joint loss is a mean over n networks. What only the largest of them holds has a gradient from one of the n, and so
moves an n-th as far as it would in a step of that network alone. Divided by the networks that hold it instead, every
coordinate moves by the mean of its holders, as everywhere on the server:

    g[c]  =  1/k[c] * sum of dL_i/dw[c] over the k[c] networks that hold c      (not 1/n)
"""

from __future__ import annotations

from itertools import pairwise

import torch

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import gather, is_prefix, scatter, scatter_index
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require


def share_among_holders(model: ElasticModel, widest: Cut, cuts: list[Cut], gradients: Weights) -> None:
    """Multiply, in place, the gradient of a mean over n networks by n / k; ``cuts``: the largest first."""
    nested = all(outer.holds(inner) for outer, inner in pairwise(cuts))
    require(
        nested, "step_cuts", cuts, 'cuts inside one another, the largest first, with joint_mean = "holders"'
    )
    torch._foreach_mul_(list(gradients.values()), float(len(cuts)))
    for holders, cut in enumerate(cuts[1:], start=2):
        table = model.inside(widest, cut)
        factor = (holders - 1) / holders  # what this network holds, all larger ones hold too
        views = []
        for name, gradient in gradients.items():
            where = table.get(name)
            if where is None:
                continue
            if is_prefix(where):
                views.append(scatter_index(gradient, where)[0])
            else:
                scatter(gradient, where, gather(gradient, where) * factor)
        torch._foreach_mul_(views, factor)
