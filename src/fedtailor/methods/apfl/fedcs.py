"""FedCS, federated channel search: every client finds the layer widths that suit its data and its budget.

Luo, Chen, Li, Feng, "Architecture Personalization in Resource-constrained Federated Learning", NeurIPS workshop 2021,
Algorithm 1. Symbols: theta_k = units kept of each channel group, R = ``shrink``, C(theta) <= B_k the client's budget.
Warm-up: Yu and Huang, "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from fedtailor.client import sgd
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Client, Lease, ServerState, Task, Update
from fedtailor.methods.apfl.architectures import (
    architecture,
    can_run_all,
    described,
    found_architecture,
    reported_units,
)
from fedtailor.methods.apfl.channel_search import LocalScore, Shrinking, searched
from fedtailor.methods.apfl.fedpa import PartialAggregation
from fedtailor.methods.apfl.sandwich import sandwich
from fedtailor.methods.registry import register
from fedtailor.objective import distillation_loss
from fedtailor.seeds import Seeds


@register("fedcs")
@dataclass(frozen=True)
class FedCS(PartialAggregation):
    """Warm-up of a slimmable super-network, then greedy local channel pruning; ``apfl`` goes on with FedPA.

    What was found is in ``ServerState.memory["architectures"]``: client -> group -> units, and in ``metrics.jsonl``.
    """

    # The four networks of a warm-up step take more memory and time than one.
    honours: ClassVar[frozenset[str] | None] = frozenset({"width", "macs", "params", "bytes"})

    warmup: float = 0.3  # rounds, or a share of all rounds below 1
    smallest: WidthLike = 0.35  # the narrowest width of the sandwich
    random_widths: int = 2  # networks between the smallest and the full one, in each step
    per_group: bool = False  # draw a width for each channel group instead of one for all
    distillation: bool = True  # the full network teaches the others; false: they learn from labels
    shrink: WidthLike = 0.1  # R, the share of a group's units that one step of the search removes
    objective: Literal["drop", "drop_per_mac"] = "drop"
    min_channels: int = 1  # units that the search leaves in a group
    search_examples: int = 512  # at most so many of a client's examples judge its networks
    search_at_once: int = 0  # clients in a round of the search; 0: as many as in other rounds

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.warmup < float("inf"), "method.warmup", self.warmup, "rounds, or a share below 1")
        object.__setattr__(self, "smallest", as_width(self.smallest, "method.smallest"))
        object.__setattr__(self, "shrink", as_width(self.shrink, "method.shrink"))
        require(self.shrink != 1, "method.shrink", 1, "above 0 and below 1")
        require(self.random_widths >= 0, "method.random_widths", self.random_widths, "at least 0")
        objectives = ("drop", "drop_per_mac")
        require(self.objective in objectives, "method.objective", self.objective, " or ".join(objectives))
        require(self.min_channels >= 1, "method.min_channels", self.min_channels, "at least 1")
        require(self.search_examples >= 2, "method.search_examples", self.search_examples, "at least 2")
        require(self.search_at_once >= 0, "method.search_at_once", self.search_at_once, "at least 0")

    # Stages

    @property
    def warmup_rounds(self) -> int:
        """How many rounds the warm-up takes."""
        if self.warmup >= 1 or self.warmup == 0:
            return ceil(self.warmup)
        if self.local.rounds is None:
            raise FedtailorError(
                f"method.warmup = {self.warmup}: a share needs training.rounds, the length of the run"
            )
        return round(self.warmup * self.local.rounds)

    def init(self, model: ElasticModel) -> ServerState:
        stage = "warm-up" if self.warmup_rounds else "search"
        return ServerState(0, model.weights(), {"architectures": {}, "over": False, "stage": stage})

    def participants(
        self, state: ServerState, clients: Sequence[Client], model: ElasticModel
    ) -> Sequence[Client]:
        """Warm-up: clients that can run the full network. Search: those that have not searched. Then nobody."""
        if state.round < self.warmup_rounds:
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
        warming = state.round < self.warmup_rounds
        if not warming and (state.memory["over"] or client.id in state.memory["architectures"]):
            return super().assign(state, client, model, seeds)
        patch = model.cut(state.weights, Cut.everything(), self.policy.travelling(model))
        names = frozenset(patch.values) if warming else frozenset[str]()
        lease = Lease(names, patch.cut)
        return Task(client, state.round, patch, lease, seeds, "train" if warming else "search")

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """Average what was trained; note what was found."""
        merged, memory = super().merge(state, updates, model), state.memory
        warming = state.round < self.warmup_rounds
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
        known = {update.client: state.memory["architectures"].get(update.client) for update in updates}
        found = {str(client): described(each, model) for client, each in known.items() if each}
        return {**said, "architectures": found}

    # Warm-up on the client: the sandwich rule

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """The warm-up tracks no statistics: every network of the sandwich uses those of the batch."""
        if task.round >= self.warmup_rounds:
            return super().train(task, data, model)
        trained, metrics = sgd.train(self, task, data, model)
        return self.answer(task, trained, len(data), metrics)

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        """The full network, the smallest, and random ones in between."""
        if task.round >= self.warmup_rounds:
            return [task.patch.cut]
        generator = task.seeds.numpy("widths", client=task.client.id, round=task.round, step=step)
        width, count = as_width(self.smallest), self.random_widths
        return [
            task.patch.cut,
            *sandwich(model.groups, width, count, generator, self.align, per_group=self.per_group),
        ]

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """CE(full, labels) and, for each other network, its cross-entropy against the full one's answers: their sum."""
        full, *others = outputs
        total = model.objective.loss(full, batch)
        for output in others:
            taught = distillation_loss(output, full) if self.distillation else None
            total = total + (model.objective.loss(output, batch) if taught is None else taught)
        return total

    # Search on the client

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        return (
            self.search(task, data, model) if task.action == "search" else super().perform(task, data, model)
        )

    def search(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Greedy pruning until the client's budget is met; the answer is numbers of units."""
        order = task.seeds.numpy("search examples", client=task.client.id).permutation(len(data))
        score = LocalScore(model, task.patch, data.subset(np.sort(order[: self.search_examples])))
        fits = partial(self.affordable, budget=task.client.budget, model=model)
        shrinking = Shrinking(as_width(self.shrink), self.min_channels)
        size, steps = searched(score, fits, shrinking, self.align, per_mac=self.objective == "drop_per_mac")
        measured = score.metrics(size)  # of a network that needed no step, too
        spent = ceil(score.macs / max(1, model.costs.measure("macs", model.costs.full)))
        metrics = {**measured, "examples": float(spent), "steps": float(steps)}
        metrics |= reported_units(size, model)
        return self.answer(task, Patch({}, task.patch.cut), len(data), metrics)

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """Warm-up: all networks of the sandwich. Search: forward passes, counted as passes of the full network."""
        if task.action == "search":
            return model.cost(Cut.everything())
        if task.round >= self.warmup_rounds:
            return super().work(task, model)
        model.costs.record("macs")  # every step has random widths, of which none comes again
        return self.work_by_steps(task, model)
