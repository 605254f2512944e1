"""How gradients of a part move held weights: what a step's cuts say, what the optimiser keeps, and what rests."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.sgd import sgd

from fedtailor.client.copies import Places
from fedtailor.client.joint import share_among_holders
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Where, gather, scatter
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require

Table = (
    dict[str, Where] | None
)  # where the tensors of a step's cut lie inside what is held; None: it is all of it
Group = tuple[list[str], float]  # names of weights, and how strongly they decay
Inactive = Literal["held", "active"]
JointMean = Literal["networks", "holders"]


class Stepped(Protocol):
    """What a step asks of a method; ``Method`` says what each of them means."""

    @property
    def local(self) -> LocalTraining: ...
    @property
    def inactive(self) -> Inactive: ...
    @property
    def joint_mean(self) -> JointMean: ...


class Rule(Protocol):
    """An optimiser with what it keeps for the held weights."""

    def move(self, weights: Weights, gradients: Weights, table: Table, rate: float) -> None:
        """Move weights in place: those that are held, or their copies at a cut."""


class HeldWeights:
    """An optimiser on held weights whose gradients may belong to a part of them.

    What momentum, moments, weight decay and the proximal term do to coordinates outside a step's cuts is the method's
    ``inactive`` policy: ``"held"`` moves everything that the client holds, ``"active"`` only what took part in the
    step, and what the optimiser keeps for the others rests too. Without all of them the policies are the same, and
    only the part is touched.
    """

    def __init__(self, method: Stepped, held: Weights, places: Places) -> None:
        local, self.places = method.local, places
        self.local, self.per_holder = local, method.joint_mean == "holders"
        self.held = {name: value for name, value in held.items() if value.requires_grad}
        groups = decay_groups(local, self.held)
        self.rule: Rule = (
            _Sgd(local, self.held, groups) if local.is_sgd else _AnyOptimiser(local, self.held, groups)
        )
        proximal = local.proximal > 0
        self.start = {name: value.detach().clone() for name, value in self.held.items()} if proximal else {}
        self.still = local.is_sgd and local.momentum == 0 and local.weight_decay == 0 and not proximal
        self.only_active = method.inactive == "active" or self.still
        self.clips = local.clip_norm < math.inf
        self.values = list(self.held.values())
        # Views that autograd does not watch, where a step is one operation on all that is held
        self.unwatched = [value.detach() for value in self.values] if self.still else []

    def step(
        self, model: ElasticModel, outer: Cut, cuts: list[Cut], leaves: list[Weights], rate: float
    ) -> None:
        """Apply the gradients that ``backward`` left on the leaves."""
        whole = len(cuts) == 1 and cuts[0] is outer and outer.mask is None
        if not (whole and self.unwatched and self._moved_plainly(rate)):
            self._step(model, outer, cuts, leaves, rate)

    def _moved_plainly(self, rate: float) -> bool:
        """A step of plain SGD on all that is held, in one operation; False if it is something else after all."""
        gradients = [value.grad for value in self.values if value.grad is not None]
        if len(gradients) < len(self.values) or any(gradient.is_sparse for gradient in gradients):
            return False
        for value in self.values:
            value.grad = None
        self._move_plainly(gradients, rate)
        return True

    def _move_plainly(self, gradients: list[Tensor], rate: float) -> None:
        if self.clips:
            clip_(gradients, self.local.clip_norm)
        torch._foreach_add_(self.unwatched, gradients, alpha=-rate)

    def step_by(self, gradients: list[Tensor], model: ElasticModel, outer: Cut, rate: float) -> None:
        """Apply dense gradients of all that is held, in its order; they may be changed in place."""
        if self.unwatched:
            self._move_plainly(gradients, rate)
            return
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient
        self._step(model, outer, [outer], [self.held], rate)

    @torch.no_grad()
    def _step(
        self, model: ElasticModel, outer: Cut, cuts: list[Cut], leaves: list[Weights], rate: float
    ) -> None:
        widest, values = self._moved(outer, cuts, leaves)
        table = None if widest == outer else model.inside(outer, widest)
        gradients = self._collect(model, widest, cuts, leaves)
        if not gradients:
            return
        if self.per_holder and len(cuts) > 1:
            share_among_holders(model, widest, cuts, gradients)
        weights = {name: values[name] for name in gradients}
        if self.start:
            self._pull_back(gradients, weights, table)
        if self.clips:
            clip_(list(gradients.values()), self.local.clip_norm)
        self.rule.move(weights, gradients, table, rate)
        if table is not None:
            self._put_back(widest, table, weights)

    def _put_back(self, cut: Cut, table: dict[str, Where], weights: Weights) -> None:
        places = self.places.at(cut, table)
        if places is not None:
            torch._foreach_copy_([places[name] for name in weights], list(weights.values()))
            return
        for name, weight in weights.items():
            scatter(self.held[name], table[name], weight)

    def _moved(self, outer: Cut, cuts: list[Cut], leaves: list[Weights]) -> tuple[Cut, Weights]:
        """The smallest cut that holds all that a step moves, and its weights: the step's copies, or what is held."""
        if self.only_active:
            for cut, values in zip(cuts, leaves, strict=True):
                if len(cuts) == 1 or all(cut.holds(other) for other in cuts):
                    return (outer, self.held) if cut.unmasked == outer else (cut, values)
            # Moving everything held is the same as moving the cuts alone only as long as nothing else moves it.
            require(
                self.still, "step_cuts", cuts, "cuts inside one another, where inactive coordinates must rest"
            )
        return outer, self.held

    def _collect(self, model: ElasticModel, widest: Cut, cuts: list[Cut], leaves: list[Weights]) -> Weights:
        """Sum the gradients of all cuts into tensors of the widest one, and clear them."""
        total: Weights = {}
        for inner, values in zip(cuts, leaves, strict=True):
            narrower = inner.unmasked != widest
            for name in self.held:
                leaf = values.get(name)
                if leaf is None or (gradient := leaf.grad) is None:
                    continue
                leaf.grad = None  # two cuts may share a leaf, which has their sum already
                if narrower:
                    wide = torch.zeros(
                        model.shape(name, widest), dtype=gradient.dtype, device=gradient.device
                    )
                    scatter(wide, model.inside(widest, inner)[name], gradient)
                    gradient = wide
                total[name] = total[name] + gradient if name in total else gradient
        return total

    def _pull_back(self, gradients: Weights, weights: Weights, table: Table) -> None:
        """The gradient of FedProx's term: mu * (w - w_round)."""
        for name, gradient in gradients.items():
            start = self.start[name] if table is None else gather(self.start[name], table[name])
            gradient.add_(weights[name] - start, alpha=self.local.proximal)


class _Sgd:
    """SGD: one call of PyTorch's function for all weights of a group."""

    def __init__(self, local: LocalTraining, held: Weights, groups: list[Group]) -> None:
        self.local, self.held, self.groups = local, held, groups
        self.momenta: dict[str, Tensor | None] = dict.fromkeys(held)
        self.plain = local.momentum == 0 and len(groups) == 1 and groups[0][1] == 0

    def move(self, weights: Weights, gradients: Weights, table: Table, rate: float) -> None:
        moving = self.local.momentum > 0
        if self.plain and not any(gradient.is_sparse for gradient in gradients.values()):
            # What PyTorch's function comes to, in half the time of a small network's step
            torch._foreach_add_(list(weights.values()), list(gradients.values()), alpha=-rate)
            return
        for group, decay in self.groups:
            names = (
                list(gradients) if len(self.groups) == 1 else [name for name in group if name in gradients]
            )
            momenta = [self._momentum(name, table) if moving else None for name in names]
            sgd(
                [weights[name] for name in names], [gradients[name] for name in names], momenta,
                weight_decay=decay, momentum=self.local.momentum, lr=rate, dampening=0.0,
                nesterov=self.local.nesterov, maximize=False, foreach=True,
            )  # fmt: skip
            for name, momentum in zip(names, momenta, strict=True) if moving else ():
                self._keep(name, table, momentum)

    def _momentum(self, name: str, table: Table) -> Tensor | None:
        momentum = self.momenta[name]
        if table is None:
            return momentum
        if momentum is None:
            momentum = self.momenta[name] = torch.zeros_like(self.held[name])
        return gather(momentum, table[name])

    def _keep(self, name: str, table: Table, momentum: Tensor | None) -> None:
        if table is None:
            self.momenta[name] = momentum
            return
        kept = self.momenta[name]
        if momentum is not None and kept is not None:
            scatter(kept, table[name], momentum)


class _AnyOptimiser:
    """An optimiser of PyTorch's on what is held; for a part it is lent the part's weights, and their part of its state.

    What it keeps for a coordinate has the coordinate's place in a tensor of the weights' shape. One number for a whole
    tensor, such as Adam's count of steps, goes on with every step that the tensor takes part in.
    """

    def __init__(self, local: LocalTraining, held: Weights, groups: list[Group]) -> None:
        self.local, self.held, self.groups = local, held, [names for names, _ in groups]
        self.optimiser = local.built.over(
            [{"params": [held[name] for name in names], **_decaying(local, decay)} for names, decay in groups]
        )

    def move(self, weights: Weights, gradients: Weights, table: Table, rate: float) -> None:
        for name, gradient in gradients.items():
            weights[name].grad = gradient
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if table is None:
            self.optimiser.step()
        else:
            self._step_of_a_part(weights, table)
        for weight in weights.values():
            weight.grad = None

    def _step_of_a_part(self, weights: Weights, table: dict[str, Where]) -> None:
        state, groups = self.optimiser.state, self.optimiser.param_groups
        for group, names in zip(groups, self.groups, strict=True):
            group["params"] = [weights[name] for name in names if name in weights]
        for name, weight in weights.items():
            held = self.held[name]
            if state.get(held):
                state[weight] = {
                    key: gather(value, table[name]) if _shaped(value, held) else value
                    for key, value in state[held].items()
                }
        self.optimiser.step()
        for name, weight in weights.items():
            held, part = self.held[name], state.pop(weight, {})
            kept = state[held] if state.get(held) else self._at_rest(held)
            for key, value in part.items():
                if _shaped(value, weight):
                    scatter(kept[key], table[name], value)
                else:
                    kept[key] = value
            state[held] = kept
        for group, names in zip(groups, self.groups, strict=True):
            group["params"] = [self.held[name] for name in names]

    def _at_rest(self, held: Tensor) -> dict[str, Any]:
        """What the optimiser keeps for coordinates that no step has moved yet: as after a gradient of zero."""
        stand_in = torch.zeros_like(held, requires_grad=True)
        stand_in.grad = torch.zeros_like(held)
        alone = self.local.built.over([{"params": [stand_in], **_decaying(self.local, 0.0)}])
        alone.step()
        return dict(alone.state[stand_in])


def _shaped(value: object, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == like.shape


def decay_groups(local: LocalTraining, held: Weights) -> list[Group]:
    """Weights that decay, and those that do not; one group where all are alike."""
    if local.decayed == "all" or local.weight_decay == 0:
        return [(list(held), local.weight_decay)]
    matrices = [name for name, value in held.items() if value.dim() >= 2]
    others = [name for name in held if name not in set(matrices)]
    groups = [(matrices, local.weight_decay), (others, 0.0)]
    return [group for group in groups if group[0]]


def _decaying(local: LocalTraining, decay: float) -> dict[str, float]:
    """The decay of a group, for classes that know such a thing."""
    return {"weight_decay": decay} if "weight_decay" in local.built.settings else {}


def check_follows_cuts(local: LocalTraining, inactive: Inactive) -> None:
    """Refuse an optimiser whose state cannot be cut where steps may move a part alone."""
    if inactive == "active" and not local.is_sgd and not local.built.follows_cuts:
        raise FedtailorError(
            f"training.optimiser = {local.optimiser!r}: it keeps tensors of other shapes than its weights, of which no "
            "part can be taken for the steps of a smaller network; expected one such as adamw"
        )


def clip_(gradients: list[Tensor], most: float) -> None:
    """Shorten gradients in place to a norm of ``most`` at the most, as ``torch.nn.utils.clip_grad_norm_`` does.

    That one asks for weights which carry them, and a gradient here may belong to a part of a weight.
    """
    share = most / (get_total_norm(gradients) + 1e-6)
    torch._foreach_mul_(gradients, torch.clamp(share, max=1.0))
