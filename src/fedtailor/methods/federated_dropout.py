"""Federated Dropout, and its extension to unequal devices (eFD): random channels, packed into a small network.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements", 2018: one rate
for all; the extension is the baseline of Horvath et al., "FjORD", NeurIPS 2021 (a rate per device class).
Symbols: p = share of units kept; F_p = eFD's global model of width p; p_max = what a device can train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from fedtailor.data.batches import Batch
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import CHANNEL_LIMITS, fit
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, kept, prefix, random_units
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.scaling import scaler
from fedtailor.errors import require, unknown
from fedtailor.messages import Client, ServerState, Task
from fedtailor.method import Method
from fedtailor.methods.dropping import SCALINGS, Scaling, scaled_behind
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds


@register("federated-dropout")
@dataclass(frozen=True)
class FederatedDropout(Method):
    """One drop rate for every client; the units kept are drawn anew in every round.

    ``scaling`` says where the missing units are made up for: nowhere (the clients' networks are networks of their own),
    in training (outputs divided by the share kept), or at evaluation (the full model's outputs multiplied by it).
    """

    honours: ClassVar[frozenset[str] | None] = None  # one rate for all, whatever the budget
    policies: ClassVar[tuple[Policy, ...]] = ("averaged", "static")  # random cuts have no width of their own

    norm: Policy = "static"
    keep: WidthLike = 0.5  # share of the units of every layer that a client trains
    mask: Literal["round", "client"] = "client"  # one draw for all clients of a round, or one for each
    scaling: Scaling = "none"  # where dropped units are made up for: none, train or eval

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "keep", as_width(self.keep, "method.keep"))
        if self.scaling not in SCALINGS:
            raise unknown("scaling", self.scaling, SCALINGS)
        if self.mask not in ("round", "client"):
            raise unknown("mask", self.mask, ("round", "client"))

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """Channels have no order here, so no prefix is better than another: every device is given the full model."""
        return Cut.everything()

    @property
    def whole_width(self) -> Fraction:
        """The width of the network that units are dropped from."""
        return Fraction(1)

    def held(self, client: Client, model: ElasticModel) -> Cut:
        """How many units of each group the client trains; which of them is the draw's business."""
        return prefix(model.groups, as_width(self.keep), self.grid)

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """Both sides can derive the draw from the seed, so no mask travels."""
        owner = client.id if self.mask == "client" else None

        def generator(group: str) -> np.random.Generator:
            return seeds.numpy(f"dropout {group}", client=owner, round=state.round)

        return random_units(model.groups, self.held(client, model), generator)

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        whole = self.whole_width
        scale = scaler(model, cut, self.policy, whole) if self.scaling == "train" else None
        return model.forward(weights, cut, batch, mode="train", scale=scale)

    def as_deployed(self, state: ServerState, patch: Patch, model: ElasticModel) -> Patch:
        """With ``scaling = "eval"``, weights behind dropped units are multiplied by the share that was kept."""
        if self.scaling != "eval":
            return patch
        return scaled_behind(patch, np.full(model.units.total, float(as_width(self.keep))), model)


@register("efd")
@dataclass(frozen=True)
class EFD(FederatedDropout):
    """Federated Dropout with a rate for every device class; ``global_width`` trains FjORD's baseline model F_p.

    With ``global_width = p`` the global model has width p: a device that can train all of it does, a smaller one keeps
    the fraction p_max / p of its units at random. FjORD's row in a table is one such run for every p.
    """

    honours: ClassVar[frozenset[str] | None] = CHANNEL_LIMITS

    global_width: WidthLike = 1  # the width of the global model; efd trains one for each

    def __post_init__(self) -> None:
        super().__post_init__()
        only = "none or train: devices of efd keep different shares, and there is no one of them to scale by"
        require(self.scaling != "eval", "method.scaling", self.scaling, only)
        object.__setattr__(self, "global_width", as_width(self.global_width, "method.global_width"))

    @property
    def whole_width(self) -> Fraction:
        return as_width(self.global_width)

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        return prefix(model.groups, as_width(self.global_width), self.grid)

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        whole = self.cut_for(state, client.budget, model)
        able = fit(model.costs, client.budget, self.grid, workload=self.workload)
        if able.holds(whole):
            return whole
        owner = client.id if self.mask == "client" else None
        channels = {}
        for group in model.groups.elastic:
            full = model.groups.counts[group]
            units = whole.count(group, full)
            share = Fraction(able.count(group, full), units)
            count = units if share >= 1 else kept(share, units, self.grid)
            generator = seeds.numpy(f"dropout {group}", client=owner, round=state.round)
            channels[group] = np.sort(generator.choice(units, size=count, replace=False)).tolist()
        return Cut.of(model.groups, channels)
