"""FedCS, federated channel search: every client finds the layer widths that suit its data and its budget.

Luo, Chen, Li, Feng, "Architecture Personalization in Resource-constrained Federated Learning", NeurIPS workshop 2021,
Algorithm 1. Symbols: theta_k = units kept of each channel group, R = ``shrink``, C(theta) <= B_k the client's budget.
Warm-up: Yu and Huang, "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import lt
from typing import Any, Literal

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.curves import Counts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Client, Lease, ServerState, Task, Update
from fedtailor.methods.apfl.architectures import (
    architecture,
    can_run_all,
    described,
    found_architecture,
    reported_units,
)
from fedtailor.methods.apfl.channel_search import searched
from fedtailor.methods.apfl.judging import By, Judge
from fedtailor.methods.apfl.warm_up import UNSEEN, WARM_UP, WarmUp
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

SEARCH = "search"  # what a task asks for
SPENT = "share of budget"  # of the multiply-accumulates that a client's budget allows, what its network takes


@register("fedcs")
@dataclass(frozen=True)
class FedCS(WarmUp):
    """Warm-up of a slimmable super-network, then greedy local channel pruning; ``apfl`` goes on with FedPA.

    What was found is in ``ServerState.memory["architectures"]``: client -> group -> units, and in ``metrics.jsonl``.
    """

    shrink: WidthLike = 0.1  # R, the share of a group's units that one step of the search removes
    # What a step of the search loses least of: accuracy, or accuracy per MAC
    objective: Literal["drop", "drop_per_mac"] = "drop"
    min_channels: int = 1  # units that the search leaves in a group, if the smallest width leaves fewer
    judge: By = "loss"  # by which networks are compared on the client's own examples, or "accuracy"
    search_examples: int = 0  # at most so many of a client's examples judge its networks; 0: all
    search_at_once: int = 0  # clients in a round of the search; 0: as many as in other rounds

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shrink", as_width(self.shrink, "method.shrink"))
        require(self.shrink != 1, "method.shrink", 1, "above 0 and below 1")
        objectives = ("drop", "drop_per_mac")
        require(self.objective in objectives, "method.objective", self.objective, " or ".join(objectives))
        require(self.min_channels >= 1, "method.min_channels", self.min_channels, "at least 1")
        require(self.judge in ("loss", "accuracy"), "method.judge", self.judge, "loss or accuracy")
        enough = self.search_examples == 0 or self.search_examples >= 2
        require(enough, "method.search_examples", self.search_examples, "0 (all) or at least 2")
        require(self.search_at_once >= 0, "method.search_at_once", self.search_at_once, "at least 0")

    def check_task(self, model: ElasticModel) -> None:
        super().check_task(model)
        known, judge = list(model.objective.metrics), self.judge
        fine = judge == "loss" or judge in known
        require(fine, "method.judge", judge, f"loss, as the metrics are {', '.join(known) or 'none'}")

    # Stages

    def init(self, model: ElasticModel) -> ServerState:
        stage = "warm-up" if self.warmup_rounds else "search"
        memory: dict[str, Any] = {
            "architectures": {},
            "over": False,
            "stage": stage,
            "learnt": False,
            **UNSEEN,
        }
        return ServerState(0, model.weights(), memory)

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """A uniform width, none below what the warm-up trains: the search goes no further down either."""
        found = super().cut_for(state, budget, model)
        if self.warmup_rounds and any(map(lt, model.costs.counts(found), self.least(model))):
            raise FedtailorError(
                f"{budget}: it pays for no network of width {self.narrowest}, the narrowest that the warm-up trains "
                "and the search may find; lower method.smallest, or give the device a larger budget"
            )
        return found

    def least(self, model: ElasticModel) -> Counts:
        """The fewest units that the search leaves in each group: those of the narrowest network that was trained."""
        narrowest = model.costs.counts(prefix(model.groups, self.narrowest, self.grid))
        trained = narrowest if self.warmup_rounds else (1,) * len(narrowest)
        return tuple(max(self.min_channels, count) for count in trained)

    def participants(
        self, state: ServerState, clients: Sequence[Client], model: ElasticModel
    ) -> Sequence[Client]:
        """Warm-up: clients that can run the full network. Search: those that have not searched. Then nobody."""
        if self.warming(state):
            able = [client for client in clients if can_run_all(client.budget, model)]
            if not able:
                raise FedtailorError(
                    "no client can run the full network, which the warm-up trains: give one tier width = 1, or set "
                    "method.warmup = 0"
                )
            return able
        return self.unsearched(state, clients) or self.trainers(clients)

    def unsearched(self, state: ServerState, clients: Sequence[Client]) -> list[Client]:
        """Who is next in the search; nobody when all have answered, or when nobody did who was asked."""
        if state.memory["over"] or len(state.memory["architectures"]) == len(clients):
            return []
        left = [client for client in clients if client.id not in state.memory["architectures"]]
        return left[: self.search_at_once or None]

    def trainers(self, clients: Sequence[Client]) -> Sequence[Client]:
        """Who trains after the search."""
        return []

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """theta_k; a client that has not searched, or whose budget has become smaller, keeps a uniform width."""
        found = state.memory["architectures"].get(client.id)
        if found is not None and self.affordable(cut := architecture(found, model), client.budget, model):
            return cut
        return self.cut_for(state, client.budget, model)

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """The super-network to warm it up or to search in it; afterwards the client's part of it."""
        warming = self.warming(state)
        if not warming and (state.memory["over"] or client.id in state.memory["architectures"]):
            return super().assign(state, client, model, seeds)
        patch = model.cut(state.weights, Cut.everything(), self.policy.travelling(model))
        names = frozenset(patch.values) if warming else frozenset[str]()
        lease = Lease(names, patch.cut)
        return Task(client, state.round, patch, lease, seeds, WARM_UP if warming else SEARCH)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """Average what was trained; note what was found."""
        merged, memory = super().merge(state, updates, model), state.memory
        warming = self.warming(state)
        found = {
            update.client: found_architecture(update, model) for update in updates if not update.patch.values
        }
        known = {**memory["architectures"], **found}
        stage = "warm-up" if warming else "search" if found else "fedpa" if updates else memory["stage"]
        # Where nobody answers the search is over, and whoever has not searched keeps a uniform width.
        over = memory["over"] or not (warming or updates)
        return replace(merged, memory={**memory, "architectures": known, "over": over, "stage": stage})

    def notes(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> dict[str, Any]:
        """The stage; of a search round what its clients found: its cost, and the share of units kept of every group."""
        said = {"stage": state.memory["stage"], "searched": len(state.memory["architectures"])}
        if state.memory["stage"] != "search":
            return said
        said["progress"] = f"search ({said['searched']} clients)"
        found, known = {}, state.memory["architectures"]
        for update in updates:
            if each := known.get(update.client):
                found[str(update.client)] = {**described(each, model), SPENT: update.metrics.get(SPENT)}
        return {**said, "architectures": found}

    # Search on the client

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        return self.search(task, data, model) if task.action == SEARCH else super().perform(task, data, model)

    def search(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Down until the client's budget is met, up until it is spent; the answer is numbers of units."""
        order = task.seeds.numpy("search examples", client=task.client.id).permutation(len(data))
        judge = Judge(
            model, task.patch, data.subset(np.sort(order[: self.search_examples or None])), self.judge
        )
        limits = self.limits(task.client.budget, model)
        size, steps = searched(
            judge, limits, self.least(model), as_width(self.shrink), self.grid,
            per_mac=self.objective == "drop_per_mac",
        )  # fmt: skip
        macs = model.costs.measure("macs", size)
        measured = judge.metrics(size)  # of a network that needed no step, too
        spent = ceil(judge.macs / max(1, model.costs.measure("macs", model.costs.full)))
        metrics = {**measured, "examples": float(spent), "steps": float(steps)}
        metrics |= {SPENT: float(macs / limits["macs"])} if "macs" in limits else {}
        return self.answer(task, Patch({}, task.patch.cut), len(data), metrics | reported_units(size, model))

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """Forward passes of a search are counted as passes of the full network."""
        return model.cost(Cut.everything()) if task.action == SEARCH else super().work(task, model)
