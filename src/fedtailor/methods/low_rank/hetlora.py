"""HetLoRA: every client trains the first ranks of each adapter that its budget allows, and may do with fewer.

Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024.
Symbols: r_k = the client's rank, gamma = ``decay``, lambda = ``regulariser``, S_k = ||B_k A_k||_F = a client's weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.adapters import Factors, matrices
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require
from fedtailor.merging import WEIGHTINGS, optimising
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.low_rank.products import adapters_of, squared_norm
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

PRUNED = "pruned"  # of a client's metrics: 1 where it gave up its last ranks


@register("hetlora")
@dataclass(frozen=True)
class HetLoRA(Method):
    """Truncated adapters, merged with zeros in place of ranks that a client does not have.

    Without ``sparsity_weights``, ``zero_padding`` and ``self_pruning`` it is the plain mean over those who hold a rank.
    """

    sparsity_weights: bool = True  # clients count by ||B A||_F, the norm of what they learnt, not by examples
    zero_padding: bool = True  # a rank that a client lacks counts as zeros in the mean
    self_pruning: bool = True  # a client whose last ranks shrank in training does without them from then on
    decay: float = 0.99  # gamma: the share of ranks that pruning keeps, at least one less than before
    regulariser: float = 0.01  # lambda: times |B| |A| of the last ranks, added to the loss

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.decay < 1, "method.decay", self.decay, "above 0 and below 1")
        require(0 <= self.regulariser < float("inf"), "method.regulariser", self.regulariser, "at least 0")
        if self.zero_padding and self.merging.active:
            raise FedtailorError(
                f"{self.merging}: zeros in the place of ranks that clients lack would outvote those who hold them; "
                "expected method.zero_padding = false, or merge.rule = 'mean'"
            )

    def check_task(self, model: ElasticModel) -> None:
        adapters_of(model, self.name)

    def init(self, model: ElasticModel) -> ServerState:
        return replace(super().init(model), memory={"prunings": {}})

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """The first ranks that the budget allows, less those that this client has given up."""
        cut = self.cut_for(state, client.budget, model)
        for _ in range(state.memory["prunings"].get(str(client.id), 0)):
            cut = pruned(model.groups, cut, self.decay)
        return cut

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        task = super().assign(state, client, model, seeds)
        if not self.self_pruning:
            return task
        return replace(task, lease=replace(task.lease, partial=frozenset(model.groups.elastic)))

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Train, and give up the last ranks if the norm of their factors is smaller than it was."""
        update = super().train(task, data, model)
        if not self.self_pruning:
            return update
        fewer, pairs = pruned(model.groups, task.patch.cut, self.decay), adapters_of(model, self.name)
        before, after = (
            float(tails(values, pairs, fewer, model.groups))
            for values in (task.patch.values, update.patch.values)
        )
        smaller = after < before
        patch = model.part(update.patch, fewer) if smaller else update.patch
        return replace(update, patch=patch, metrics={**update.metrics, PRUNED: float(smaller)})

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        loss = super().loss(outputs, weights, batch, task, model)
        if not self.self_pruning or self.regulariser == 0:
            return loss
        fewer = pruned(model.groups, task.patch.cut, self.decay)
        last = tails(weights[0], adapters_of(model, self.name), fewer, model.groups)
        return loss + self.regulariser * last.to(loss)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        pairs = adapters_of(model, self.name)
        weight = WEIGHTINGS[self.weighting]
        norms = {update.client: learnt(update.patch, pairs) for update in updates}
        if self.sparsity_weights and any(norms.values()):
            shares, weight = norms, lambda update: shares[update.client]
        sent = padded(updates, pairs, model) if self.zero_padding else updates
        prunings = dict(state.memory["prunings"])
        for update in updates:
            if update.metrics.get(PRUNED):
                prunings[str(update.client)] = prunings.get(str(update.client), 0) + 1
        merged = optimising.merge(self.server, state, sent, model, weight, self.merging)
        return replace(merged, memory={**state.memory, "prunings": prunings})

    def notes(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> Mapping[str, Any]:
        return {"clients that pruned": len(state.memory["prunings"])}


def pruned(groups: ChannelGroups, cut: Cut, decay: float) -> Cut:
    """The cut with floor(gamma r) of its r first ranks, at least what the group's constraint allows."""
    counts = {group: cut.count(group, groups.counts[group]) for group in groups.elastic}
    fewer = {
        group: range(min(count, groups.constraint(group).round_up(max(1, int(decay * count)), of=count)))
        for group, count in counts.items()
    }
    return cut.with_channels(groups, fewer)


def tails(
    values: Mapping[str, Tensor], pairs: Sequence[Factors], fewer: Cut, groups: ChannelGroups
) -> Tensor:
    """Sum over the layers of |B| |A| (Frobenius) of the ranks that ``fewer`` does without."""
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        up, down = matrices(values[pair.up], values[pair.down])
        kept = fewer.count(pair.group, groups.counts[pair.group])
        total = total.to(up.device) + torch.linalg.norm(up[:, kept:]) * torch.linalg.norm(down[kept:])
    return total


def learnt(patch: Patch, pairs: Sequence[Factors]) -> float:
    """S_k: the Frobenius norm of all products B A together."""
    products = [matrices(patch.values[pair.up], patch.values[pair.down]) for pair in pairs]
    return sqrt(sum(max(0.0, squared_norm(up, down)) for up, down in products))


def padded(updates: Sequence[Update], pairs: Sequence[Factors], model: ElasticModel) -> list[Update]:
    """The updates at the largest rank among them, with zeros for the ranks that a client lacks."""
    groups = model.groups
    most = {
        pair.group: range(
            max(update.patch.cut.count(pair.group, groups.counts[pair.group]) for update in updates)
        )
        for pair in pairs
        if updates
    }
    widest = Cut.of(groups, most)
    return [replace(update, patch=_padded(update.patch, widest, model)) for update in updates]


def _padded(patch: Patch, widest: Cut, model: ElasticModel) -> Patch:
    if patch.cut == widest:
        return patch
    zeros = {
        name: value.new_zeros(model.shape(name, Cut.everything()))
        for name, value in patch.values.items()
        if name in model.groups.extents
    }
    beside = {name: value for name, value in patch.values.items() if name not in zeros}
    return Patch({**beside, **model.cut(model.place(zeros, patch), widest).values}, widest)
