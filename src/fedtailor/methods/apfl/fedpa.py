"""FedPA, federated partial aggregation: clients of different architectures train parts of one super-network.

Luo, Chen, Li, Feng, "Architecture Personalization in Resource-constrained Federated Learning", NeurIPS workshop 2021.
Symbols: theta_k = the number of units that client k keeps of each channel group. Widths may cross: one client may be
wider in one layer and narrower in another. FedUniform is FedPA with one width for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from torch import Tensor

from fedtailor.client import training
from fedtailor.client.evaluate import evaluate_patches
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import absolute_limits, fit
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.elasticity.running.norm import Policy
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.apfl.architectures import architecture
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

SUPER = Cut(tag="global")  # the super-network, whose statistics a client measures for itself


@dataclass(frozen=True)
class PartialAggregation(Method):
    """What FedPA and its relatives share: every client's norm statistics stay with it, and it evaluates itself.

    An evaluation has two answers. The client's own network, on its own statistics, is the paper's *Loc*; the whole
    super-network, its norms calibrated on the client's examples, is *Glo* (``global accuracy``). The statistics of a
    client's last training lag behind the merged weights as long as these move fast: ``recalibrate`` measures new ones.
    """

    policies: ClassVar[tuple[Policy, ...]] = ("local",)

    norm: Policy = "local"
    # Before a client's network is used, measure its statistics for the merged weights
    recalibrate: bool = False

    def limits(self, budget: Budget, model: ElasticModel) -> dict[str, int | Fraction]:
        """What a network may cost; a width stands for the FLOPs and parameters of that width in all layers."""
        limits = absolute_limits(model.costs, budget, self.workload)
        if budget.width is None:
            return limits
        cost = model.cost(prefix(model.groups, as_width(budget.width), self.grid))
        of_width = {"macs": cost.macs, "params": cost.params}
        return limits | {name: min(limit, limits.get(name, limit)) for name, limit in of_width.items()}

    def affordable(self, cut: Cut, budget: Budget, model: ElasticModel) -> bool:
        """C(theta) <= B for every limit."""
        limits = self.limits(budget, model)
        return all(model.costs.of_limit(name, cut, self.workload) <= limit for name, limit in limits.items())

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Train on the statistics of the last time; they go into the client's memory, and nowhere else."""
        cut = task.patch.cut
        known = {n: v for n, v in task.memory.items() if n in norm.tagged_statistics(model, cut)}
        statistics = known or norm.statistics_at(model, model.weights(), [cut])
        patch = Patch({**task.patch.values, **statistics}, cut)
        lease = replace(task.lease, names=task.lease.names | frozenset(statistics))
        working = replace(task, patch=patch, lease=lease)
        trained, metrics = training.train(self, working, data, model)
        kept = {name: trained.values.pop(name) for name in statistics}
        return self.answer(replace(working, memory=kept), trained, len(data), metrics)

    def calibrate(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Measure the super-network's statistics; the own network's where there are none, or ``recalibrate`` asks."""
        measured: dict[str, Tensor] = {}
        own = task.lease.cut
        for cut in (SUPER,) if self._known(task, model) else (SUPER, own):
            patch = Patch(model.narrow(task.patch, cut).values, cut)  # of this tag
            measured |= norm.measure_statistics(model, patch, data, self.local.batch_size)[0]
        answer = self.answer(task, Patch({}, own), task.client.num_examples)
        return replace(answer, memory={**task.memory, **measured})

    def measuring_work(self, task: Task, model: ElasticModel) -> Cost:
        """Of an evaluation both networks; of a calibration the super-network, and the own one where it is measured."""
        whole, own = model.cost(task.patch.cut), model.cost(task.lease.cut)
        return whole if task.action == "calibrate" and self._known(task, model) else whole + own

    def _known(self, task: Task, model: ElasticModel) -> bool:
        """Whether a client's own network keeps the statistics that the client has."""
        return not self.recalibrate and norm.calibrated(model, task.memory, task.lease.cut)

    def evaluate(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """*Loc* and *Glo* on the examples given, with the statistics of the client's memory."""
        own = model.narrow(task.patch, task.lease.cut)
        whole = Patch(task.patch.values, SUPER)
        local, glob = (
            evaluate_patches(model, [norm.with_own(model, Patch(each.values, cut), task.memory)], data)
            for each, cut in ((own, task.lease.cut), (whole, SUPER))
        )
        metrics = {**local, **{f"global {name}": value for name, value in glob.items()}}
        return self.answer(task, Patch({}, task.lease.cut), task.client.num_examples, metrics)


@register("fedpa")
@dataclass(frozen=True)
class FedPA(PartialAggregation):
    """Given architectures; clients without one hold the largest cut, group by group, that their budget allows."""

    architectures: dict[str, dict[str, int]] = field(default_factory=dict)  # client -> group -> units

    def __post_init__(self) -> None:
        super().__post_init__()
        for client, widths in self.architectures.items():
            fine = client.isdecimal() and all(units >= 1 for units in widths.values())
            require(fine, "method.architectures", {client: widths}, "client numbers and at least 1 unit each")

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        return fit(model.costs, budget, self.grid, family="per_group", workload=self.workload)

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        given = self.architectures.get(str(client.id))
        if given is None:
            return self.cut_for(state, client.budget, model)
        cut = architecture(given, model)
        if not self.affordable(cut, client.budget, model):
            raise FedtailorError(
                f"method.architectures: that of client {client.id} costs {model.cost(cut).macs} MACs and "
                f"{model.cost(cut).params} parameters, which is more than {client.budget} allows"
            )
        return cut


@register("feduniform")
@dataclass(frozen=True)
class FedUniform(PartialAggregation):
    """The paper's baseline: one width for all layers, the widest that the budget allows."""
