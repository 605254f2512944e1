"""NeFL: nested pieces of fewer channels and fewer residual blocks, with norms and step sizes of their own.

Kang, Cha, Shin, Lee, Kang, "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025 (arXiv 2308.07761). Symbols: a block computes Y + s_j F(Y), with a step size s_j;
parameters that every sub-model k has for itself are called inconsistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Batch
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import first_blocks, without_blocks
from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, kept, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require
from fedtailor.messages import Client, Deployed, Lease, ServerState, Task
from fedtailor.methods.depth.branches import branch_ends
from fedtailor.methods.depth.levels import Level, LevelMethod
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

STEP = "step"  # the tag of a step size, before that of its sub-model
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@register("nefl")
@dataclass(frozen=True)
class NeFL(LevelMethod):
    """Sub-models by width and blocks; norms, their statistics and learned step sizes belong to one sub-model each."""

    policies: ClassVar[tuple[Policy, ...]] = ("per_width",)

    local: LocalTraining = LocalTraining()
    norm: Policy = "per_width"
    weighting: Literal["samples", "count"] = "count"
    level_widths: tuple[WidthLike, ...] = (0.5, 0.75, 1)  # the share of channels of each sub-model
    level_depths: tuple[WidthLike, ...] = (0.5, 0.75, 1)  # the share of each chain's blocks that it keeps
    learned_steps: bool = True  # s_j are trained with the weights; false: they stay 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level_widths", "level_depths"):
            shares = tuple(as_width(share, f"method.{name}") for share in getattr(self, name))
            rising = len(shares) > 0 and list(shares) == sorted(shares) and shares[-1] == 1
            require(rising, f"method.{name}", shares, "shares that rise to 1, one for each sub-model")
            object.__setattr__(self, name, shares)
        count, depths = len(self.level_widths), self.level_depths
        expected = f"{count} shares, as many as level_widths"
        require(len(depths) == count, "method.level_depths", depths, expected)

    def init(self, model: ElasticModel) -> ServerState:
        state = super().init(model)
        own = [self.own_values(state.weights, level.trained, model) for level in self.levels(model)]
        return replace(state, weights={**state.weights, **{n: v for each in own for n, v in each.items()}})

    def levels(self, model: ElasticModel) -> tuple[Level, ...]:
        """The first channels, and of every chain the first blocks; blocks that change the shape stay."""
        found = []
        for width, depth in zip(self.level_widths, self.level_depths, strict=True):
            stays = {
                block
                for chain in model.chains
                for block in first_blocks(chain, kept(as_width(depth), len(chain.blocks)))
            }
            gone = [block for chain in model.chains for block in chain.blocks if block not in stays]
            cut = replace(
                prefix(model.groups, as_width(width), self.grid), absent=model.exits[-1].absent
            )  # it ends where the module ends
            cut = without_blocks(cut, model.chains, gone, model.groups.extents)
            found.append(Level(cut, cut))
        return tuple(found)

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The shared weights of a sub-model, and what it has for itself under its own name."""
        cut = self.select(state, client, model, seeds)
        shared = self.policy.travelling(model) - norm_parameters(model)
        patch = model.cut(state.weights, cut, shared)
        patch = self.policy.with_statistics(model, patch, state.weights, [cut])
        patch = Patch({**patch.values, **self.own_values(state.weights, cut, model)}, cut)
        return Task(client, state.round, patch, Lease(frozenset(patch.values), cut), seeds)

    def own_values(self, weights: Mapping[str, Tensor], cut: Cut, model: ElasticModel) -> Weights:
        """Norms and step sizes of a sub-model; one that nobody has trained starts from the module's norms and 1."""
        own: Weights = {}
        plain = model.cut(weights, cut, norm_parameters(model)).values
        for name, value in plain.items():
            own[tagged(name, cut.tag)] = weights.get(tagged(name, cut.tag), value).clone()
        for layer in self._stepping(cut, model):
            name = step_name(layer, cut)
            own[name] = weights.get(name, torch.ones((), dtype=model.dtype(f"{layer}.weight"))).clone()
        return own

    def _stepping(self, cut: Cut, model: ElasticModel) -> list[str]:
        """The branches of a sub-model that have a step size."""
        if not self.learned_steps:
            return []
        return [layer for layer in branch_ends(model) if f"{layer}.weight" not in cut.absent]

    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any:
        """Y + s_j F(Y) in every block, on the norms of this sub-model."""
        own = {
            name: weights[tagged(name, cut.tag)] for name in norm_parameters(model) if name not in cut.absent
        }
        scale = {layer: weights[step_name(layer, cut)] for layer in self._stepping(cut, model)}
        return model.forward({**weights, **own}, cut, batch, mode="train", scale=scale)

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        return model.objective.loss(outputs[0], batch)

    def deploy(self, state: ServerState, budget: Budget, model: ElasticModel) -> Deployed:
        """The sub-model with its own norms, its step sizes multiplied into the layers that end its branches."""
        cut = self.cut_for(state, budget, model)
        values = dict(self.policy.deployable(model, state.weights, cut).values)
        own = self.own_values(state.weights, cut, model)
        values |= {name: own[tagged(name, cut.tag)] for name in norm_parameters(model) if name in values}
        for layer in self._stepping(cut, model):
            for name in values.keys() & {f"{layer}.weight", f"{layer}.bias"}:
                values[name] = values[name] * own[step_name(layer, cut)]
        return Deployed((Patch(values, cut),))


def norm_parameters(model: ElasticModel) -> frozenset[str]:
    """Scales and shifts of normalisation layers, which are trained."""

    def find() -> frozenset[str]:
        layers = {path: layer for path, layer in model.module.named_modules() if isinstance(layer, NORMS)}
        names = {f"{path}.{name}" for path, layer in layers.items() for name, _ in layer.named_parameters()}
        return frozenset(names & model.trainable - model.groups.ties.keys())

    return model.once("norm parameters", find)


def step_name(layer: str, cut: Cut) -> str:
    """What the step size of a branch is called in a sub-model."""
    return tagged(tagged(f"{layer}.weight", STEP), cut.tag)
