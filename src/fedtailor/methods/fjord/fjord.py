"""FjORD: every local step trains one of the nested widths that the device can afford (ordered dropout).

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021. Symbols: P = ``widths``, D_P = ``probabilities``,
p_max = the largest width of P within a client's budget, F_p = the first ceil(p K) units of every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from fedtailor.data.batches import Batch
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import CHANNEL_LIMITS, fit_among
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Client, ServerState, Task
from fedtailor.method import Method
from fedtailor.methods.fjord.draws import drawn_units, drawn_width, largest_width, mixed_prefixes
from fedtailor.methods.fjord.shares import shares_of
from fedtailor.methods.nested import Widths, as_widths, known, require_shares, with_fleet_widths
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds


@register("fjord")
@dataclass(frozen=True)
class FjORD(Method):
    """Ordered dropout: one width p <= p_max per step, and the p_max network teaches the smaller ones.

    What a client returns is credited by capacity: the whole prefix p_max, whichever widths its steps drew.
    """

    inactive: ClassVar[Literal["held", "active"]] = "held"  # the authors decay all that a client holds

    # A step with distillation runs two networks: it may take more memory and time than the cut alone.
    honours: ClassVar[frozenset[str] | None] = CHANNEL_LIMITS - {"memory", "step_time"}

    norm: Policy = "per_width"
    widths: Widths = "uniform-5"  # P: uniform-k for 1/k, 2/k ... 1, a list, or "fleet" for its tiers'
    probabilities: tuple[float, ...] = ()  # D_P, one for each width; none: all alike
    distillation: bool = True  # the p_max network runs in every step and teaches the drawn one
    alpha: float = 1.0  # the student learns from the teacher (1), from the labels (0), or from both
    temperature: float = 1.0  # T, softens both answers in distillation
    per_layer: bool = False  # draw a width for every channel group instead of one for all
    slice_embeddings: bool = False  # the paper keeps all columns of embeddings
    mean_budget: bool = False  # a budget of MACs limits the mean over the drawn widths, not the largest one
    random_drop: float = 0.0  # FjORD + eFD: d, the cap on random dropout in the next larger width; 0: off

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "widths", as_widths(self.widths))
        if self.probabilities:
            require_shares(self.probabilities, self.widths)
        require(0 <= self.alpha <= 1, "method.alpha", self.alpha, "a number from 0 to 1")
        require(
            0 < self.temperature < float("inf"), "method.temperature", self.temperature, "a number above 0"
        )
        require(0 <= self.random_drop < 1, "method.random_drop", self.random_drop, "at least 0 and below 1")
        if self.per_layer and self.random_drop:
            raise FedtailorError("method.per_layer and method.random_drop: expected at most one of them")
        if self.mean_budget and (
            self.distillation or self.per_layer or self.random_drop or self.probabilities
        ):
            raise FedtailorError(
                "method.mean_budget: expected plain draws of one width; set method.distillation = false and leave "
                "probabilities, per_layer and random_drop as they are"
            )
        if self.per_layer and self.policy.per_width:
            raise FedtailorError(
                "method.per_layer: networks of mixed widths have no statistics of one width; set method.norm = 'static'"
            )

    @property
    def candidates(self) -> tuple[Fraction, ...]:
        """P, ascending."""
        return known(self.widths)

    for_fleet = with_fleet_widths

    def check_task(self, model: ElasticModel) -> None:
        if self.distillation and self.alpha > 0:
            model.learning_task.check_teaching(self.name, "method.distillation = false")

    def cut_at(self, width: Fraction, model: ElasticModel) -> Cut:
        """F_p: the prefix of every group, except the columns of embeddings."""
        cut = prefix(model.groups, width, self.grid)
        if self.slice_embeddings or not model.embedded:
            return cut
        sliced = {group: units for group, units in cut.channels.items() if group not in model.embedded}
        return cut.with_channels(model.groups, sliced)

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        return self.largest_cut(budget, model)

    def largest_cut(self, budget: Budget, model: ElasticModel) -> Cut:
        """F_p of the largest width of P that the budget allows: other widths have never been trained."""
        if self.mean_budget and budget.macs is not None:
            shares = self.shares_at(budget, model)
            return self.cut_at(
                max(w for w, share in zip(self.candidates, shares, strict=True) if share), model
            )
        return fit_among(model.costs, budget, self.candidates, lambda width: self.cut_at(width, model))

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """The prefix p_max; with random dropout also the units that were drawn from the next larger width."""
        own = self.largest_cut(client.budget, model)
        beyond = self.random_cut(client, state.round, model, seeds)
        if beyond is None:
            return own
        units = {group: {*own.channels[group], *beyond.channels[group]} for group in beyond.channels}
        return Cut.of(
            model.groups, {group: sorted(each) for group, each in units.items()}, f"{own.tag}+", own.width
        )

    def patch_for(self, state: ServerState, cut: Cut, model: ElasticModel) -> Patch:
        """The statistics of every width that the client may run travel with its weights."""
        patch = model.cut(state.weights, cut, self.policy.travelling(model))
        inside = [self.cut_at(width, model) for width in self.candidates if width <= largest_width(cut)]
        return self.policy.with_statistics(model, patch, state.weights, inside)

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        """The teacher F_p_max and the student F_p, p ~ D_P given p <= p_max; the student alone without distillation."""
        largest = largest_width(task.patch.cut)
        admissible = [width for width in self.candidates if width <= largest]
        beyond = self.random_cut(task.client, task.round, model, task.seeds)
        # With random dropout the next larger width of P may be drawn as well.
        drawable = self.candidates[: len(admissible) + (beyond is not None)]
        generator = task.seeds.numpy("width", client=task.client.id, round=task.round, step=step)
        if self.per_layer:
            student = self._mixed_cut(admissible, generator, model)
        else:
            width = self._draw(drawable, generator, self.shares_for(task, model))
            if beyond is not None and width > largest:
                return [beyond]
            student = self.cut_at(width, model)
        if not self.distillation or len(admissible) == 1:
            return [student]
        teacher = self.cut_at(largest, model)
        # A student as wide as its teacher has nothing to learn from it: with alpha = 1 its gradient is zero.
        return [student] if student == teacher and self.alpha == 1 else [teacher, student]

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """CE(teacher, labels) + (1 - alpha) CE(student, labels) + alpha CE(student, teacher); both passes count."""
        if len(outputs) == 1:
            return super().loss(outputs, weights, batch, task, model)
        teacher, student = outputs
        total = model.objective.loss(teacher, batch)
        if self.alpha > 0:
            total = total + self.alpha * model.learning_task.taught(student, teacher, batch, self.temperature)
        if self.alpha < 1:
            total = total + (1 - self.alpha) * model.objective.loss(student, batch)
        return total

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """The mean over the client's steps, teachers included."""
        return self.work_by_steps(task, model)

    def random_cut(self, client: Client, round: int, model: ElasticModel, seeds: Seeds) -> Cut | None:
        """FjORD + eFD: random units of the next larger width, the same for all steps of a client's round.

        A share of max(1 - d, p_max / p) of F_p's units is kept: where the cap d binds, that is more than p_max allows.
        """
        if self.random_drop == 0:
            return None
        own = largest_width(self.largest_cut(client.budget, model))
        larger = [width for width in self.candidates if width > own]
        if not larger:
            return None
        share = max(1 - Fraction(f"{self.random_drop:.12g}"), own / larger[0])
        dropping = self.cut_at(own, model).channels
        return drawn_units(self.cut_at(larger[0], model), dropping, share, model.groups, client, round, seeds)

    def _mixed_cut(
        self, widths: Sequence[Fraction], generator: np.random.Generator, model: ElasticModel
    ) -> Cut:
        sliced = self.cut_at(self.candidates[0], model).channels
        return mixed_prefixes(sliced, lambda: self._draw(widths, generator), model.groups, self.grid)

    def shares_at(self, budget: Budget, model: ElasticModel) -> tuple[float, ...]:
        """How often each width is drawn so that the mean cost of a step is exactly what the budget allows."""

        def solve() -> tuple[float, ...]:
            return shares_of([self.cut_at(width, model) for width in self.candidates], budget, model)

        return model.once(("shares", self, budget), solve)  # a client's steps all ask the same

    def shares_for(self, task: Task, model: ElasticModel) -> Sequence[float]:
        """D_P for a client; none: all alike."""
        budget = task.client.budget
        return self.shares_at(budget, model) if self.mean_budget and budget.macs else self.probabilities

    def _draw(
        self,
        widths: Sequence[Fraction],
        generator: np.random.Generator,
        shares: Sequence[float] | None = None,
    ) -> Fraction:
        return drawn_width(widths, self.probabilities if shares is None else shares, generator)
