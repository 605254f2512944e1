"""FlexLoRA: the products of the clients' factors are averaged, and every device is given the best factors of its rank.

Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024. Symbols: W = sum_k n_k / n B_k A_k, its singular value decomposition W = U S V^T; a device of
rank r is given B = U_r S_r and A = V_r^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.elasticity.adapters import Factors, matrices
from fedtailor.elasticity.model import ElasticModel
from fedtailor.merging import WEIGHTINGS
from fedtailor.messages import ServerState, Update
from fedtailor.method import Method
from fedtailor.methods.low_rank.products import adapters_of, split
from fedtailor.methods.registry import register


@register("flexlora")
@dataclass(frozen=True)
class FlexLoRA(Method):
    """One decomposition serves all ranks: its first columns and rows are the best factors of each.

    What is no factor of an adapter (a head that is trained beside them) is averaged as ever.
    """

    shared_merge: ClassVar[bool] = (
        False  # factors come from a decomposition: there is no difference to step along
    )

    def check_task(self, model: ElasticModel) -> None:
        adapters_of(model, self.name)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        merged = super().merge(state, updates, model)
        weight = WEIGHTINGS[self.weighting]
        counted = sorted(
            (update for update in updates if weight(update) > 0), key=lambda update: update.client
        )
        if not counted:
            return merged
        total = sum(weight(update) for update in counted)
        weights = dict(merged.weights)
        for pair in adapters_of(model, self.name):
            parts = [
                (
                    *matrices(update.patch.values[pair.up], update.patch.values[pair.down]),
                    weight(update) / total,
                )
                for update in counted
            ]
            weights.update(refactored(state.weights, pair, parts))
        return replace(merged, weights=weights)


def refactored(
    old: dict[str, Tensor], pair: Factors, parts: Sequence[tuple[Tensor, Tensor, float]]
) -> dict[str, Tensor]:
    """Both factors at full rank, of the weighted mean of the products.

    Ranks that the mean does not have are zero in B and stay what they were in A, as an adapter starts: they add nothing
    and can be learnt.
    """
    before, row = old[pair.up], old[pair.down]
    rank = before.shape[1]
    up, down = split(parts, rank)
    found = up.shape[1]
    ups = torch.zeros((len(before), rank), dtype=torch.float64, device=before.device)
    downs = row.flatten(1).double().clone()
    ups[:, :found], downs[:found] = up, down
    return {
        pair.up: ups.reshape(before.shape).to(before.dtype),
        pair.down: downs.reshape(row.shape).to(row.dtype),
    }
