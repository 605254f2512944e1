"""OFA-FL: nested sub-networks of single weights, found by lottery-ticket pruning and trained together.

Varma, Diao, Roosta, Ding, Zhang, "Once-for-All Federated Learning: Learning From and Deploying to Heterogeneous
Clients", KDD FL4Data-Mining 2023. Symbols: R = ``ratios``, c_i = the largest ratio within a client's budget, m_r = the
mask of ratio r. The number of ratios that have been pruned for is the *depth*; masks are numbered like the ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Literal, cast

from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import DEEPEST, Levels, Mask
from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require
from fedtailor.messages import Client, Lease, Metrics, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.masks import mask_factors, masked
from fedtailor.methods.pruning import prunable, prune, requirements, rewind, unpruned
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

Needs = Mapping[str, list[str]]  # limit -> the least of it that pays for each ratio


@register("ofa-fl")
@dataclass(frozen=True)
class OFAFL(Method):
    """Progressive lottery-ticket pruning on the server, the mean loss of all nested networks on the client.

    The paper's ablations are settings: LTP is ``joint_loss = false``; one-shot pruning is ``pruning = "one-shot"`` with
    ``rewind = false`` and ``joint_loss = false``; layer-wise pruning is ``layerwise = true``.
    """

    honours: ClassVar[frozenset[str] | None] = frozenset({"width", "params", "density"})

    norm: Policy = "static"
    ratios: tuple[WidthLike, ...] = (1, 0.8, 0.6, 0.4, 0.2)  # R, descending from 1
    joint_loss: bool = True  # the mean over the client's own and all smaller networks; false: its own alone
    pruning: Literal["progressive", "one-shot"] = "progressive"  # one ratio in an event, or all at once
    layerwise: bool = False  # prune every tensor to the ratio by itself instead of all together
    rewind: bool = True  # what survives an event goes back to its value before training
    trigger: Literal["convergence", "schedule"] = "convergence"  # when the next pruning happens
    tolerance: float = 1e-3  # convergence: the least improvement of the loss, relative to the best one
    patience: int = 3  # convergence: evaluations in a row without it
    first: int = 200  # schedule: the round before which the first event happens
    every: int = 50  # schedule: rounds from one event to the next

    def __post_init__(self) -> None:
        super().__post_init__()
        ratios = tuple(as_width(ratio, "method.ratios") for ratio in self.ratios)
        falling = max(ratios, default=0) == 1 and list(ratios) == sorted(set(ratios), reverse=True)
        require(falling and len(ratios) <= DEEPEST, "method.ratios", self.ratios, "1 and then smaller ratios")
        object.__setattr__(self, "ratios", ratios)
        kinds = ("progressive", "one-shot")
        require(self.pruning in kinds, "method.pruning", self.pruning, " or ".join(kinds))
        triggers = ("convergence", "schedule")
        require(self.trigger in triggers, "method.trigger", self.trigger, " or ".join(triggers))
        require(0 <= self.tolerance < 1, "method.tolerance", self.tolerance, "at least 0 and below 1")
        require(self.patience >= 1, "method.patience", self.patience, "at least 1")
        require(self.first >= 0, "method.first", self.first, "at least 0")
        require(self.every >= 1, "method.every", self.every, "at least 1")

    # Which networks there are

    @property
    def densities(self) -> tuple[Fraction, ...]:
        """R as exact rationals."""
        return cast(tuple[Fraction, ...], self.ratios)

    def number(self, budget: Budget, model: ElasticModel) -> int:
        """The number of the largest ratio that a budget pays for."""
        needs: Needs = model.once(
            ("requirements", self.densities), lambda: requirements(self.densities, model)
        )
        full = Fraction(needs["params"][0])
        limits = {
            name: limit * full if name == "params" and isinstance(limit, Fraction) else limit
            for name, limit in budget.limits.items()
        }
        for number in range(len(self.densities)):
            if all(Fraction(needs[name][number]) <= limit for name, limit in limits.items()):
                return number
        raise TooSmallError(f"{budget}: no ratio of method.ratios fits it; the smallest is {self.ratios[-1]}")

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """m_r of the budget's ratio r; while that has not been pruned for, of the smallest that has."""
        depth = state.memory["depth"]
        level = min(depth, self.number(budget, model))
        mask = Mask(Levels(state.memory["levels"]), level) if depth else None
        return Cut(tag=str(self.ratios[level]), mask=mask)

    def networks(self, cut: Cut) -> list[Cut]:
        """What the holder of a cut trains: its own network, then all smaller ones."""
        if cut.mask is None or not self.joint_loss:
            return [cut]
        levels = cut.mask.levels
        smaller = range(cut.mask.level + 1, levels.depth + 1)
        return [cut, *(Cut(tag=str(self.ratios[level]), mask=Mask(levels, level)) for level in smaller)]

    # On the server

    def init(self, model: ElasticModel) -> ServerState:
        memory = {"depth": 0, "levels": {}, "known": {}, "best": None, "stale": 0}
        return ServerState(0, model.weights(), memory)

    def begin(self, state: ServerState, model: ElasticModel) -> ServerState:
        """Prune and rewind, if the trigger has fired."""
        memory, last = state.memory, len(self.ratios) - 1
        before = depth = memory["depth"]
        scheduled = state.round >= self.first + self.every * depth
        due = scheduled if self.trigger == "schedule" else memory["stale"] >= self.patience
        if depth == last or not due:
            return state
        levels = Levels(memory["levels"]) if depth else unpruned(state.weights, prunable(model))
        for ratio in self.densities[depth + 1 : None if self.pruning == "one-shot" else depth + 2]:
            levels = prune(state.weights, levels, depth, ratio, layerwise=self.layerwise)
            depth += 1
        weights = rewind(state.weights, model, levels, before + 1) if self.rewind else state.weights
        changed = {"depth": depth, "levels": dict(levels.maps), "best": None, "stale": 0}
        return replace(state, weights=weights, memory={**memory, **changed})

    def notes(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> dict[str, Any]:
        """The ratios that have been pruned for."""
        return {"supported": [str(ratio) for ratio in self.densities[: state.memory["depth"] + 1]]}

    def participants(
        self, state: ServerState, clients: Sequence[Client], model: ElasticModel
    ) -> Sequence[Client]:
        """Clients whose ratio has been pruned for."""
        depth = state.memory["depth"]
        if depth == len(self.ratios) - 1:
            return clients
        supported = cache(lambda budget: self.number(budget, model) <= depth)  # clients share few budgets
        return [client for client in clients if supported(client.budget)]

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The surviving weights; and the map of levels, where the client has not got it and needs it."""
        cut = self.select(state, client, model, seeds)
        patch = model.cut(state.weights, cut, self.policy.travelling(model))
        patch = self.policy.with_statistics(model, patch, state.weights, self.networks(cut))
        known = state.memory["known"].get(client.id) == state.memory["depth"]
        levels = None if known else self._map_for(cut)
        lease = Lease(frozenset(patch.values), cut)
        return Task(client, state.round, patch, lease, seeds, levels=levels)

    def _map_for(self, cut: Cut) -> Levels | None:
        """The map that the holder of a cut works with; the full network alone needs none."""
        return cut.mask.levels if cut.mask is not None and (self.joint_loss or cut.mask.level) else None

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """The one merge rule; who has answered has the map of levels that it was sent."""
        merged = super().merge(state, updates, model)
        sent = [update.client for update in updates if self._map_for(update.patch.cut) is not None]
        known = {**state.memory["known"], **dict.fromkeys(sent, state.memory["depth"])}
        return replace(merged, memory={**state.memory, "known": known})

    @property
    def chooses(self) -> bool:
        return self.trigger == "convergence"

    def observe(self, state: ServerState, evaluation: Mapping[str, Metrics]) -> ServerState:
        """Whether the smallest network, which the smallest device was given, still improves."""
        loss, best = next(iter(evaluation.values()))["loss"], state.memory["best"]
        better = best is None or best - loss > self.tolerance * abs(best)
        seen = {"best": loss, "stale": 0} if better else {"stale": state.memory["stale"] + 1}
        return replace(state, memory={**state.memory, **seen})

    # On the client

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Masks as factors: dense tensors that are 0 outside a mask are trained, no kernel gains from single zeros."""
        masks = mask_factors(self.networks(task.lease.cut), model)
        return replace(task, patch=model.spread(task.patch), prepared={"masks": masks})

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        """The client's own network and all smaller ones; the loss is their mean."""
        return self.networks(task.lease.cut)

    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any:
        """A product with the mask also masks the gradient."""
        return model.forward(masked(weights, cut, task.prepared["masks"]), cut.unmasked, batch, mode="train")

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """A full pass for each network: zeros are multiplied like other numbers."""
        one = super().work(task, model)
        return replace(one, macs=one.macs * len(self.networks(task.lease.cut)))
