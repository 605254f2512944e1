"""A method: what one paper does differently from plain federated averaging, as hooks with defaults.

    state         → begin → the state that a round starts from
    state, client → select → Cut → assign → Task          on the server
    Task, data    → perform → Update                      on the client:
                    prepare → train, every step: step_cuts → forward → loss; or calibrate, or evaluate
    state, updates → merge → state of the next round      on the server
    state, budget  → deploy → what a device is given

A method holds numbers only. What changes lives in ``ServerState.memory`` and in the client's ``memory``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from fedtailor.client import together, training
from fedtailor.client.evaluate import evaluate_patches
from fedtailor.client.local_steps import Diverged
from fedtailor.client.local_training import LocalTraining
from fedtailor.client.stepping import JointMean, check_follows_cuts
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import CHANNEL_LIMITS
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.elasticity.running.norm import NormPolicy, Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.merging import WEIGHTINGS, optimising
from fedtailor.merging.robust.settings import MergeSettings, refuse_own_rule
from fedtailor.merging.settings import ServerSettings, refuse_own_merge
from fedtailor.messages import Client, Deployed, Lease, Metrics, ServerState, Task, Update
from fedtailor.seeds import Seeds

IN_TRAINING = ("perform", "train", "prepare", "step_cuts", "forward", "loss", "answer")  # hooks of a client
SECTIONS = ("local", "server", "merging")  # fields that are tables of a config: [training], [server], [merge]


@dataclass(frozen=True)
class Method:
    """Hyper-parameters and hooks; subclass it, override what differs, and ``register`` the result."""

    name: ClassVar[str] = ""  # set by ``register``; of a class that is not registered, its own
    inactive: ClassVar[Literal["held", "active"]] = "held"  # what momentum and decay move outside step cuts
    policies: ClassVar[tuple[Policy, ...]] = norm.FOR_ANY_METHOD  # values of ``norm`` that make sense for it
    honours: ClassVar[frozenset[str] | None] = CHANNEL_LIMITS  # limits it keeps to; None: looks at none

    # Whether ``merge`` is, or calls, that of this class: [server] and [merge] act there, and nowhere else.
    shared_merge: ClassVar[bool] = True
    rules: ClassVar[tuple[str, ...]] = (
        "norm",
        "weighting",
        "align",
    )  # settings that a fair comparison keeps equal

    local: LocalTraining = LocalTraining()  # [training]
    norm: Policy = "averaged"  # what happens to the running statistics of norm layers
    weighting: Literal["samples", "count"] = "samples"  # clients count by their examples, or all alike
    # Round widths up to a multiple, for hardware that likes 8 or 16; "auto": one that is fast here, measured
    align: int | Literal["auto"] = 1
    server: ServerSettings = ServerSettings()  # [server]
    merging: MergeSettings = MergeSettings()  # [merge]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __post_init__(self) -> None:
        if self.norm not in self.policies:
            raise unknown("normalisation policy", self.norm, self.policies)
        if self.weighting not in WEIGHTINGS:
            raise unknown("weighting", self.weighting, WEIGHTINGS)
        fine = self.align == "auto" or (type(self.align) is int and self.align >= 1)
        require(fine, "method.align", self.align, 'a whole number of at least 1, or "auto"')
        check_follows_cuts(self.local, self.inactive)
        if not self.shared_merge:
            refuse_own_merge(self.server, self.name)
            refuse_own_rule(self.merging, self.name)

    def for_fleet(self, budgets: Sequence[Budget], model: ElasticModel) -> Self:
        """Itself, with what it settles only when it knows the budgets of all tiers."""
        return self

    def check_task(self, model: ElasticModel) -> None:
        """Refuse, before a run starts, a task that this method cannot train; the default can train any."""

    def init(self, model: ElasticModel) -> ServerState:
        """The state before the first round."""
        return ServerState(0, model.weights())

    def begin(self, state: ServerState, model: ElasticModel) -> ServerState:
        """Before each round: what a change of stage does to the state (pruning and the like)."""
        return state

    def participants(
        self, state: ServerState, clients: Sequence[Client], model: ElasticModel
    ) -> Sequence[Client]:
        """Who may be sampled in this round."""
        return clients

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """The piece for a device of this budget, in training and in deployment."""
        return model.fit(budget, self.grid, workload=self.workload)

    @property
    def grid(self) -> int:
        """The multiple of channels that widths are rounded up to; a run settles ``auto`` before it asks a hook."""
        if self.align == "auto":
            raise FedtailorError(
                'method.align = "auto": expected a number here; a run measures it when it starts'
            )
        return self.align

    @property
    def policy(self) -> NormPolicy:
        """What happens to the running statistics of norm layers."""
        return norm.POLICIES[self.norm]

    @property
    def workload(self) -> Workload:
        """One local step, as limits on memory and time mean it."""
        local = self.local
        return Workload(local.batch_size, local.optimiser_slots, local.accumulate)

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """Which coordinates this client holds in this round: here what its budget says, the same for equal ones."""
        budget = (
            client.budget
        )  # tiers share one object; it is kept beside the cut, so that its id stays its own
        return state.once(self, ("cut", id(budget)), lambda: (budget, self.cut_for(state, budget, model)))[1]

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """What the client is sent, and what it must send back."""
        cut = self.select(state, client, model, seeds)
        if cut.mask is None:  # clients of one cut are sent the same tensors, which nobody writes to
            key = (cut, cut.tag, cut.width)
            patch = state.once(self, key, lambda: self.patch_for(state, cut, model))
        else:
            patch = self.patch_for(state, cut, model)
        return Task(client, state.round, patch, Lease(frozenset(patch.values), cut), seeds)

    def patch_for(self, state: ServerState, cut: Cut, model: ElasticModel) -> Patch:
        """What a client of this cut is sent: its weights, and the statistics of what it may run."""
        patch = model.cut(state.weights, cut, self.policy.travelling(model))
        return self.policy.with_statistics(model, patch, state.weights, [cut])

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Do what the task asks for."""
        if task.action == "calibrate":
            return self.calibrate(task, data, model)
        if task.action in ("evaluate", "validate"):
            return self.evaluate(task, data, model)
        require(task.action == "train", "task.action", task.action, f"an action that {self.name} knows")
        return self.train(self.prepare(task, data, model), data, model)

    def train(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Train what was prepared, and send back the part of it that the lease names."""
        patch, metrics = training.train(self, task, data, model)
        return self.answer(task, model.part(patch, task.lease.cut), len(data), metrics)

    def trains_as(self, kind: type[Method]) -> bool:
        """Whether all that clients do in training is what this class of methods says."""
        return all(getattr(type(self), hook) is getattr(kind, hook) for hook in IN_TRAINING)

    @property
    def alike(self) -> bool:
        """Whether training looks at nothing of a client but its examples: then many can be one batch of networks."""
        return self.trains_as(Method)

    def train_together(
        self, tasks: Sequence[Task], data: Sequence[Examples], model: ElasticModel
    ) -> list[Update | Diverged]:
        """``train`` for clients of one piece, all at once (``training.together``)."""
        found = together.train_together(self, tasks, data, model)
        return [
            each
            if isinstance(each, Diverged)
            else self.answer(task, model.part(each[0], task.lease.cut), len(own), each[1])
            for task, own, each in zip(tasks, data, found, strict=True)
        ]

    def calibrate(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Measure the norm statistics of a piece on the client's data."""
        statistics, batches = norm.measure_statistics(model, task.patch, data, self.local.batch_size)
        return self.answer(task, Patch(statistics, task.patch.cut), batches)

    def evaluate(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """Loss and metrics of a piece on the client's data."""
        metrics = evaluate_patches(model, [task.patch], data)
        return self.answer(task, Patch({}, task.lease.cut), task.client.num_examples, metrics)

    def answer(self, task: Task, patch: Patch, weight: float, metrics: Metrics | None = None) -> Update:
        """The update that answers a task."""
        return Update(task.client.id, task.round, task.round, patch, weight, dict(metrics or {}), task.memory)

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """Before local training: look at the data, fill ``task.prepared``, narrow what will be sent back."""
        return task

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        """The networks that run in one local step; each lies inside what the client holds."""
        return [task.patch.cut]

    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any:
        """One network's output in training."""
        return model.forward(weights, cut, batch, mode="train")

    @property
    def joint_mean(self) -> JointMean:
        """By whom a coordinate moves where a step runs several networks inside one another, whose mean is the loss.

        By the mean of all of them, or of those that hold it.
        """
        return "networks"

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """What a local step minimises, from the output and the weights of each step cut."""
        if len(outputs) == 1:
            return model.objective.loss(outputs[0], batch)
        first, *others = (model.objective.loss(output, batch) for output in outputs)
        return sum(others, first) / len(outputs)

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """The next state: the mean over holders, or the rule of [merge], and what [server] makes of it."""
        return optimising.merge(self.server, state, updates, model, WEIGHTINGS[self.weighting], self.merging)

    @property
    def only_shared_merge(self) -> bool:
        """Whether ``merge`` is the shared one and nothing else: no single answer is looked at."""
        return type(self).merge is Method.merge

    @property
    def chooses(self) -> bool:
        """Whether ``observe`` decides anything: it is shown validation examples then, so that test examples do not."""
        return type(self).observe is not Method.observe

    def observe(self, state: ServerState, evaluation: Mapping[str, Metrics]) -> ServerState:
        """Look at the tiers' evaluation, the smallest device's first; ``begin`` acts on what was seen."""
        return state

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """What one local step costs for one example; a backward pass counts as two forward passes.

        The task is the one that was sent: nothing of it is prepared.
        """
        cost = model.cost(task.patch.cut)
        return Cost(cost.params, 3 * cost.macs, cost.bytes)

    def measuring_work(self, task: Task, model: ElasticModel) -> Cost:
        """What ``calibrate`` or ``evaluate`` costs for one example: a forward pass of every network that it runs."""
        return model.cost(task.patch.cut)

    def work_by_steps(self, task: Task, model: ElasticModel) -> Cost:
        """``work`` for methods whose steps differ: their mean, known to the server where draws are derived from seeds.

        It asks ``step_cuts`` for a task that is not prepared.
        """
        steps = self.local.steps_for(task.client.num_examples)
        passes = [model.cost(cut).macs for step in range(steps) for cut in self.step_cuts(task, step, model)]
        held = model.cost(task.patch.cut)
        return Cost(held.params, 3 * sum(passes) // steps, held.bytes)

    def as_deployed(self, state: ServerState, patch: Patch, model: ElasticModel) -> Patch:
        """A piece as it runs after training: what ``forward`` does to outputs in training is in its weights."""
        return patch

    def deploy(self, state: ServerState, budget: Budget, model: ElasticModel) -> Deployed:
        """What a device of this budget is given, without retraining."""
        cut = self.cut_for(state, budget, model)
        return Deployed((self.as_deployed(state, self.policy.deployable(model, state.weights, cut), model),))

    def notes(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> Mapping[str, Any]:
        """After every merge and evaluation: plain small values for the record; ``stage`` or ``progress`` are shown."""
        return {}

    def diagnostics(
        self, state: ServerState, model: ElasticModel, kept: Mapping[int, Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """Tables about a finished run, for a report, written beside the weights; ``kept``: clients' memories."""
        return {}


def own_settings(method: Method | type[Method]) -> dict[str, Field[Any]]:
    """The settings of [method], by name; those of other tables are not among them."""
    return {
        item.name: item
        for item in fields(method)
        if item.name not in SECTIONS and item.metadata.get("setting", True)
    }


def refuse_measured(method: Method) -> None:
    """All runs of a comparison have one grid of widths, and a measurement may come out otherwise for each of them."""
    require(
        method.align != "auto", "method.align", method.align,
        "a number in a comparison, the same for all runs; a run by itself says which is fast here",
    )  # fmt: skip
