"""Split-Mix: the network is split into narrow base networks; a device trains and runs as many as it can afford.

Hong et al., "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization", ICLR 2022.
Symbols: rho = the width of a base network, m = 1 / rho their number, R = a device's budget as a width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from fedtailor.client import training
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import fit
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tag_of, tagged, untagged
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, prefix, window
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.scaling import folded, scaler
from fedtailor.errors import FedtailorError
from fedtailor.messages import Client, Deployed, Lease, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

BASE = "base"  # of the tags of base networks


@register("splitmix")
@dataclass(frozen=True)
class SplitMix(Method):
    """Independent base networks of width ``base``; a budget of width R trains and deploys floor(R / base) of them.

    Tensors of base number 3 are called ``conv1.weight@base3``: bases share nothing, so the one merge rule joins each of
    them over the clients that trained it.
    """

    policies: ClassVar[tuple[Policy, ...]] = ("averaged",)  # each base tracks statistics of its own

    base: WidthLike = 0.125  # the width of each network; 1 over a whole number
    scaler: bool = False  # multiply layer outputs by 1 / base in training, and only there

    def __post_init__(self) -> None:
        super().__post_init__()
        width = as_width(self.base, "method.base")
        object.__setattr__(self, "base", width)
        if (1 / width).denominator != 1:
            raise FedtailorError(
                f"method.base = {self.base}: expected 1 over a whole number, such as 1/8 or 0.25"
            )

    @property
    def count(self) -> int:
        """m, the number of base networks."""
        return int(1 / as_width(self.base))

    def bases_for(self, budget: Budget, model: ElasticModel) -> int:
        """How many base networks a budget pays for: floor(R / rho), in exact arithmetic."""
        largest = fit(model.costs, budget, workload=self.workload)
        affordable = largest.share(model.groups) / as_width(self.base)
        if affordable < 1:
            raise FedtailorError(
                f"{budget} is below one base network of width {self.base}; choose a smaller method.base"
            )
        return min(self.count, int(affordable))

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """The shape of one base network."""
        self.bases_for(budget, model)
        return prefix(model.groups, as_width(self.base), self.grid)

    def init(self, model: ElasticModel) -> ServerState:
        """Base b starts from the b-th diagonal block of the module, drawn for the full fan-in as in their code."""
        shape, weights, values = prefix(model.groups, as_width(self.base), self.grid), model.weights(), {}
        for base in range(self.count):
            block = window(model.groups, shape, lambda group, base=base: base * len(shape.channels[group]))  # type: ignore[misc]
            values.update(named(model.cut(weights, block).values, base))
        return ServerState(0, values, {"draws": 0})

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        cut = self.cut_for(state, client.budget, model)
        bases = choose_bases(
            self.count,
            self.bases_for(client.budget, model),
            state.memory["draws"] + client.slot,
            client,
            state.round,
            seeds,
        )
        names = self.policy.travelling(model)
        values = {
            tag: state.weights[tag]
            for base in bases
            for tag in (tagged(name, f"{BASE}{base}") for name in sorted(names))
        }
        return Task(client, state.round, Patch(values, cut), Lease(frozenset(values), cut), seeds)

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Bases share no parameter, so training one after the other on the same batches is training them together."""
        values: dict[str, Tensor] = {}
        losses = []
        metrics: dict[str, float] = {}
        for base, weights in by_base(task.patch.values).items():
            alone = replace(
                task,
                patch=Patch(weights, task.patch.cut),
                lease=replace(task.lease, names=frozenset(weights)),
            )
            patch, metrics = training.train(self, alone, data, model)
            values.update(named(patch.values, base))
            losses.append(metrics["loss"])
        return self.answer(
            task, Patch(values, task.patch.cut), len(data), {**metrics, "loss": sum(losses) / len(losses)}
        )

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        scale = scaler(model, cut, self.policy) if self.scaler else None
        return model.forward(weights, cut, batch, mode="train", scale=scale)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        merged = super().merge(state, updates, model)
        return replace(merged, memory={"draws": state.memory["draws"] + len(updates)})

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """Every base is a network of its own."""
        one = super().work(task, model)
        return sum([one] * (len(by_base(task.patch.values)) - 1), one)

    def deploy(self, state: ServerState, budget: Budget, model: ElasticModel) -> Deployed:
        """The first floor(R / rho) bases; their logits are averaged."""
        cut, parts = self.cut_for(state, budget, model), by_base(state.weights)
        names = self.policy.travelling(model)
        chosen = [parts[base] for base in range(self.bases_for(budget, model))]
        pieces = [Patch({n: v.clone() for n, v in part.items() if n in names}, cut) for part in chosen]
        return Deployed(tuple(self.as_deployed(state, piece, model) for piece in pieces))

    def as_deployed(self, state: ServerState, patch: Patch, model: ElasticModel) -> Patch:
        return folded(model, patch, scaler(model, patch.cut, self.policy)) if self.scaler else patch


def named(values: Mapping[str, Tensor], base: int) -> dict[str, Tensor]:
    """The tensors of a base under their own names."""
    return {tagged(name, f"{BASE}{base}"): value for name, value in values.items()}


def by_base(values: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Tensors with plain names, sorted by base."""
    parts: dict[int, dict[str, Tensor]] = {}
    for tag, value in values.items():
        base = int(tag_of(tag).removeprefix(BASE))
        parts.setdefault(base, {})[untagged(tag)] = value
    return dict(sorted(parts.items()))


def choose_bases(count: int, wanted: int, draw: int, client: Client, round: int, seeds: Seeds) -> list[int]:
    """The first from a shuffled cycle that all clients share, the rest without replacement from the others.

    ``draw`` counts the draws of all clients: in ``count`` successive draws every base comes first exactly once.
    """
    cycle = seeds.numpy("base cycle", step=draw // count).permutation(count)
    first = int(cycle[draw % count])
    others = seeds.numpy("bases", client=client.id, round=round).permutation(count)
    rest = [int(base) for base in others if base != first][: wanted - 1]
    return sorted([first, *rest])
