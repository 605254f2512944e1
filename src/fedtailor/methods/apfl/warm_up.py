"""The warm-up of FedCS: clients that can run all of it train a super-network whose parts work, too.

Yu and Huang, "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019, in rounds of FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from statistics import fmean
from typing import Any, ClassVar, Self

from torch import Tensor

from fedtailor.client import training
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Metrics, ServerState, Task, Update
from fedtailor.methods.apfl.fedpa import PartialAggregation
from fedtailor.methods.apfl.sandwich import sandwich

WARM_UP = "warm-up"  # what a task asks for
NARROWEST = Fraction(35, 100)  # of US-Net's MobileNetV2
RISE = 0.01  # of accuracy: what still counts as learning
UNSEEN: dict[str, Any] = {
    "best": None,
    "stale": 0,
}  # what the server remembers of evaluations, before the first


@dataclass(frozen=True)
class WarmUp(PartialAggregation):
    """Each local step trains the full network, the smallest one and some of random width (the sandwich rule)."""

    # The four networks of a warm-up step take more memory and time than one.
    honours: ClassVar[frozenset[str] | None] = frozenset({"width", "macs", "params", "bytes"})

    warmup: float = 0.3  # rounds at most, or a share of all rounds below 1
    # Evaluations without a rise of a point in accuracy that end the warm-up early; 0: none do
    patience: int = 0
    # The narrowest width of the sandwich; none: 0.35, or what the fleet needs
    smallest: WidthLike | None = None
    random_widths: int = 2  # networks between the smallest and the full one, in each step
    per_group: bool = False  # draw a width for each channel group instead of one for all
    distillation: bool = True  # the full network teaches the others; false: they learn from labels

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.warmup < float("inf"), "method.warmup", self.warmup, "rounds, or a share below 1")
        require(self.patience >= 0, "method.patience", self.patience, "at least 0")
        if self.smallest is not None:
            object.__setattr__(self, "smallest", as_width(self.smallest, "method.smallest"))
        require(self.random_widths >= 0, "method.random_widths", self.random_widths, "at least 0")

    def check_task(self, model: ElasticModel) -> None:
        if self.distillation and self.warmup_rounds:
            model.learning_task.check_teaching(self.name, "method.distillation = false")

    # On the server

    @property
    def narrowest(self) -> Fraction:
        """The smallest width of the sandwich."""
        return NARROWEST if self.smallest is None else as_width(self.smallest)

    def for_fleet(self, budgets: Sequence[Budget], model: ElasticModel) -> Self:
        """Trained down to what the smallest device will search for."""
        if self.smallest is not None or not self.warmup_rounds:
            return self
        fitting = [model.fit(budget, self.grid, workload=self.workload) for budget in budgets]
        return replace(self, smallest=min([NARROWEST, *(cut.width for cut in fitting if cut.width)]))

    @property
    def warmup_rounds(self) -> int:
        """How many rounds the warm-up takes at most."""
        if self.warmup >= 1 or self.warmup == 0:
            return ceil(self.warmup)
        if self.local.rounds is None:
            raise FedtailorError(
                f"method.warmup = {self.warmup}: a share needs training.rounds, the length of the run"
            )
        return round(self.warmup * self.local.rounds)

    def warming(self, state: ServerState) -> bool:
        """Whether the warm-up goes on: its rounds are not over, and the super-network still learns."""
        return state.round < self.warmup_rounds and not state.memory["learnt"]

    @property
    def chooses(self) -> bool:
        return self.patience > 0 and self.warmup > 0

    def observe(self, state: ServerState, evaluation: Mapping[str, Metrics]) -> ServerState:
        """Whether the super-network still gains a point of accuracy."""
        if not self.patience or not self.warming(state):
            return state
        accuracy = fmean(each.get("global accuracy", -each["global loss"]) for each in evaluation.values())
        best, stale = state.memory["best"], state.memory["stale"] + 1
        seen = {"best": best, "stale": stale}
        if best is None or accuracy >= best + RISE:
            seen = {"best": accuracy, "stale": 0}
        return replace(state, memory={**state.memory, **seen, "learnt": seen["stale"] >= self.patience})

    # On the client

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        """No statistics are tracked in a warm-up: every network of the sandwich uses those of the batch."""
        if task.action != WARM_UP:
            return super().perform(task, data, model)
        trained, metrics = training.train(self, task, data, model)
        return self.answer(task, trained, len(data), metrics)

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        """The full network, the smallest, and random ones in between."""
        if task.action != WARM_UP:
            return [task.patch.cut]
        generator = task.seeds.numpy("widths", client=task.client.id, round=task.round, step=step)
        drawn = sandwich(
            model.groups, self.narrowest, self.random_widths, generator, self.grid, per_group=self.per_group
        )
        return [task.patch.cut, *drawn]

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """CE(full, labels) and, for each other network, its cross-entropy against the full one's answers: their sum."""
        full, *others = outputs
        total = model.objective.loss(full, batch)
        for output in others:
            taught = model.learning_task.taught(output, full, batch) if self.distillation else None
            total = total + (model.objective.loss(output, batch) if taught is None else taught)
        return total

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """All networks of the sandwich."""
        if task.action != WARM_UP:
            return super().work(task, model)
        model.costs.record("macs")  # every step has random widths, of which none comes again
        return self.work_by_steps(task, model)
