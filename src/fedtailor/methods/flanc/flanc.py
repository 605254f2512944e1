"""FLANC: every width is composed from one neural basis that all clients train, and coefficients of its own.

Mei, Guo, Zhou, Patel, "Resource-Adaptive Federated Learning with All-In-One Neural Composition", NeurIPS 2022.
Symbols: P = ``widths``, p a width of P, V = the basis of a layer (R2 vectors, each for R1 inputs), U_p = the
coefficients of width p, lambda = ``strength``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedtailor.data.batches import Batch
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import CHANNEL_LIMITS, fit_among
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import plain, tagged
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import WidthLike, as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require, unknown
from fedtailor.messages import Client, Deployed, Lease, ServerState, Task
from fedtailor.method import Method
from fedtailor.methods.flanc.composition import (
    compose,
    fitted_coefficients,
    gram,
    orthogonality,
    principal_basis,
    two_step,
)
from fedtailor.methods.flanc.plan import Composed, Form, Plan, Recipe, plan
from fedtailor.methods.nested import Widths, as_widths, known, with_composable_widths
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds

REGULARISERS = ("mean", "norm", "off")
FORMS = ("cheaper", "composed", "two_step")


@register("flanc")
@dataclass(frozen=True)
class FLANC(Method):
    """All-in-one neural composition: V is shared by all clients, everything else by the clients of one width.

    ``conv1.weight@basis`` is V of a layer, ``conv1.weight@coefficients@1/4`` its U_p, and ``bn1.weight@1/4`` a tensor
    that is not composed. So the one merge rule takes V over all participants, the rest over those of a width, and a
    width without participants keeps its bits.
    """

    policies: ClassVar[tuple[Policy, ...]] = ("averaged",)  # each width has statistics of its own anyway
    # The two-step form holds (S / R1) R2 channels between its steps, often more than the layer itself.
    honours: ClassVar[frozenset[str] | None] = CHANNEL_LIMITS - {"memory", "step_time"}

    widths: Widths = "uniform-4"  # P: uniform-k for 1/k, 2/k ... 1, a list, or "fleet" for its tiers'
    input_share: WidthLike = 0.125  # R1, of a full layer's inputs; rounded to a divisor of every width's
    output_share: WidthLike = 0.25  # R2, of a full layer's outputs
    # R1 and R2 of single weights; 0, 0: private
    ranks: dict[str, tuple[int, int]] = field(default_factory=dict)
    regulariser: Literal["mean", "norm", "off"] = "mean"  # of the squared Gram errors: the mean, or their sum
    strength: float = 10.0  # lambda
    biases: bool = True  # composed layers keep biases, private to each width; the authors' code has none
    form: Literal["cheaper", "composed", "two_step"] = "cheaper"  # how composed layers run in training

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "widths", as_widths(self.widths))
        for name in ("input_share", "output_share"):
            object.__setattr__(self, name, as_width(getattr(self, name), f"method.{name}"))
        if self.regulariser not in REGULARISERS:
            raise unknown("regulariser", self.regulariser, REGULARISERS)
        if self.form not in FORMS:
            raise unknown("form", self.form, FORMS)
        require(0 <= self.strength < float("inf"), "method.strength", self.strength, "at least 0")

    @property
    def candidates(self) -> tuple[Fraction, ...]:
        """P, ascending."""
        return known(self.widths)

    for_fleet = with_composable_widths

    def cut_at(self, width: Fraction, model: ElasticModel) -> Cut:
        """The sizes of width p."""
        return prefix(model.groups, width, self.grid)

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        return self.largest_cut(budget, model)

    def largest_cut(self, budget: Budget, model: ElasticModel) -> Cut:
        """The largest width of P that the budget allows: other widths have no coefficients."""
        self.plan(model)  # what cannot be composed is refused before the run starts
        return fit_among(model.costs, budget, self.candidates, lambda width: self.cut_at(width, model))

    def plan(self, model: ElasticModel) -> Plan:
        """What is composed and what is not."""
        recipe = Recipe(
            self.candidates, self.grid, cast(Fraction, self.input_share), cast(Fraction, self.output_share),
            tuple(sorted((name, (first, second)) for name, (first, second) in self.ranks.items())),
            orthogonal=self.regulariser != "off", biases=self.biases,
        )  # fmt: skip
        return plan(model, recipe)

    def init(self, model: ElasticModel) -> ServerState:
        """V spans most of the module's own weights, U_p fits them at width p; the rest is cut from the module.

        Weights that read fewer inputs than in the full module are scaled as if they had been drawn for so many.
        """
        start, values = model.weights(), dict[str, Tensor]()
        reads = {place.tensor: place.dim for place in model.units.reads}
        for each in self.plan(model).composed:
            values[each.basis] = principal_basis(start[each.tensor], each.fragment, each.bases)
        for width in self.candidates:
            cut = self.cut_at(width, model)
            own = model.cut(start, cut).values
            for name in self.plan(model).private:
                fewer = start[name].shape[reads[name]] / own[name].shape[reads[name]] if name in reads else 1
                values[tagged(name, cut.tag)] = own[name] * fewer**0.5 if fewer != 1 else own[name]
            for each in self.plan(model).composed:
                inputs = start[each.tensor].shape[1]
                fitted = fitted_coefficients(own[each.tensor], values[each.basis], inputs)
                values[each.coefficients(cut)] = fitted
        return ServerState(0, values)

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        """V, and U_p and the private tensors of the client's width."""
        cut, plan = self.largest_cut(client.budget, model), self.plan(model)
        names = [name for each in plan.composed for name in (each.basis, each.coefficients(cut))]
        names += [tagged(name, cut.tag) for name in plan.private]
        values = {name: state.weights[name] for name in names}
        return Task(client, state.round, Patch(values, cut), Lease(frozenset(values), cut), seeds)

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        values, steps = self._plain(weights, cut, model), {}
        for each in self.plan(model).composed:
            basis, coefficients = weights[each.basis], weights[each.coefficients(cut)]
            if self._form(each, cut, model) == "composed":
                values[each.tensor] = compose(basis, coefficients)
            else:
                bias = values[each.biases[0]] if each.biases else None
                layer = model.shell(cut).get_submodule(each.layer)
                steps[each.layer] = partial(two_step, layer, basis, coefficients, bias)
        return model.forward(values, cut, batch, mode="train", replace=steps)

    def penalty(self, weights: Mapping[str, Tensor], model: ElasticModel) -> Tensor | None:
        """lambda * sum over layers of the squared error of V V^T against the identity."""
        if self.regulariser == "off":
            return None
        bases = [weights[each.basis] for each in self.plan(model).composed]
        return self.strength * torch.stack([orthogonality(basis, self.regulariser) for basis in bases]).sum()

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        loss = super().loss(outputs, weights, batch, task, model)
        penalty = self.penalty(weights[0], model)  # every step runs one network
        return loss if penalty is None else loss + penalty

    def work(self, task: Task, model: ElasticModel) -> Cost:
        """The layers as they are computed; parameters and bytes are those of V, U_p and what is private."""
        cut, cost = task.patch.cut, super().work(task, model)
        saved = 0
        for each in self.plan(model).composed:
            outputs, inputs = model.shape(each.tensor, cut)[:2]
            computed = each.macs(self._form(each, cut, model), outputs, inputs, self.local.batch_size)
            saved += each.dense_macs(outputs, inputs) - computed
        own = [value for name, value in task.patch.values.items() if plain(name) in model.parameters]
        params = sum(value.numel() for value in own)
        return replace(cost, params=params, macs=cost.macs - 3 * saved, bytes=task.patch.nbytes)

    @torch.no_grad()
    def deploy(self, state: ServerState, budget: Budget, model: ElasticModel) -> Deployed:
        """The composed network: the user's own layers, nothing else."""
        cut = self.largest_cut(budget, model)
        values = {name: value.clone() for name, value in self._plain(state.weights, cut, model).items()}
        for each in self.plan(model).composed:
            basis, coefficients = state.weights[each.basis], state.weights[each.coefficients(cut)]
            values[each.tensor] = compose(basis, coefficients)
        return Deployed((Patch(values, cut),))

    @torch.no_grad()
    def diagnostics(
        self, state: ServerState, model: ElasticModel, kept: Mapping[int, Mapping[str, Tensor]]
    ) -> Weights:
        """The paper's figures 5 and 6: V V^T, and the mean absolute coefficient of every fragment (column of U_p)."""
        found: Weights = {}
        for each in self.plan(model).composed:
            found[f"gram/{each.tensor}"] = gram(state.weights[each.basis])
            for width in self.candidates:
                coefficients = state.weights[each.coefficients(self.cut_at(width, model))]
                means = coefficients.reshape(-1, each.bases).abs().mean(1)
                found[f"coefficients/{each.tensor}/{width}"] = means
        return found

    def _plain(self, weights: Mapping[str, Tensor], cut: Cut, model: ElasticModel) -> Weights:
        """The private tensors of a width under the module's own names; absent biases are zero."""
        plan = self.plan(model)
        values = {name: weights[tagged(name, cut.tag)] for name in plan.private}
        like = weights[plan.composed[0].basis]
        return values | {name: like.new_zeros(model.shape(name, cut)) for name in plan.absent}

    def _form(self, each: Composed, cut: Cut, model: ElasticModel) -> Form:
        if each.positions is None:
            return "composed"
        if self.form != "cheaper":
            return self.form
        outputs, inputs = model.shape(each.tensor, cut)[:2]
        return each.cheaper(outputs, inputs, self.local.batch_size)
