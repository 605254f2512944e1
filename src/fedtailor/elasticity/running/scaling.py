"""What the outputs of a narrow network are multiplied by in training, so that they match those of the full one."""

from __future__ import annotations

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.running.norm import NormPolicy
from fedtailor.elasticity.running.pieces import Pieces


def scaler(model: Pieces, cut: Cut, policy: NormPolicy) -> dict[str, float]:
    """The factor 1 / s for every layer whose output shrinks; the classifier, whose output is fixed, keeps its own.

    In front of a batch norm the factor cancels out in training. It would only spoil running statistics, which are used
    without it, so it is left out where the policy tracks them.
    """
    groups = model.groups
    factor = 1 / float(cut.share(groups))
    if factor == 1 or (model.statistics and not policy.measured_after):
        return {}
    shrinking = set(cut.channels)
    return {layer: factor for layer, produced in groups.producers.items() if shrinking & set(produced)}
