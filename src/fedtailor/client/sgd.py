"""The one local training loop: small batches, small networks, small gradients.

Every step asks the method which cuts to run (``step_cuts``), runs each of them as a real small network on leaf copies of
the held weights, and writes the step back into the held slice. Where the step's cut is all that the client holds, the held
weights are the leaves and nothing is copied. (Gradients of sliced views would have the full size in autograd.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.sgd import sgd

from fedtailor.data.batches import Batch, Examples
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.model import ElasticModel, Weights
from fedtailor.elastic.patch import Patch, gather, scatter
from fedtailor.errors import FedtailorError, require
from fedtailor.round import Task

if TYPE_CHECKING:
    from fedtailor.method import Method


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: SGD, its schedule over the rounds, and how long."""

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None    # a fixed number of steps instead of epochs, the same for every client
    clip_norm: float = math.inf    # largest gradient norm; inf does not clip
    schedule: Literal["constant", "steps", "cosine", "exponential"] = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)    # of ``steps``: rounds, or shares of all rounds below 1
    gamma: float = 0.1    # the factor at a milestone, or per round (``exponential``)
    rounds: int | None = None    # all rounds of the run; set by the run itself

    def __post_init__(self) -> None:
        require(math.isfinite(self.lr) and self.lr > 0, "training.lr", self.lr, "a number above 0")
        require(0 <= self.momentum < 1, "training.momentum", self.momentum, "at least 0 and below 1")
        require(0 <= self.weight_decay < math.inf, "training.weight_decay", self.weight_decay, "at least 0")
        require(self.batch_size >= 1, "training.batch_size", self.batch_size, "at least 1")
        require(self.epochs >= 1, "training.epochs", self.epochs, "at least 1")
        require(self.steps is None or self.steps >= 1, "training.steps", self.steps, "at least 1")
        require(self.clip_norm > 0, "training.clip_norm", self.clip_norm, "above 0; inf does not clip")
        require(0 < self.gamma <= 1, "training.gamma", self.gamma, "above 0 and at most 1")
        require(not self.nesterov or self.momentum > 0, "training.nesterov", self.nesterov, "momentum above 0 with it")
        later = all(0 < share < math.inf for share in self.milestones)
        require(later, "training.milestones", self.milestones, "rounds, or shares of all rounds, above 0")
        schedules = ("constant", "steps", "cosine", "exponential")
        require(self.schedule in schedules, "training.schedule", self.schedule, f"one of {', '.join(schedules)}")

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        if self.schedule == "exponential":
            return self.lr * self.gamma**round
        if self.schedule == "constant":
            return self.lr
        if self.rounds is None:
            raise FedtailorError(f"training.schedule = {self.schedule!r} needs training.rounds, the length of the run")
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, round / self.rounds)))
        # As decimals: 0.55 of 20 rounds is round 11, where floats give 11.000000000000002 and so round 12.
        milestones = [Fraction(str(share)) for share in self.milestones]
        passed = sum(round >= (share * self.rounds if share < 1 else share) for share in milestones)
        return self.lr * self.gamma**passed


class Diverged(FedtailorError):
    """Local training left the numbers: the client is refused and the round goes on."""


def train(method: Method, task: Task, data: Examples, model: ElasticModel) -> tuple[Patch, dict[str, float]]:
    """Train the task's patch on the client's data; returns the trained patch and the mean loss."""
    local, cut = method.local, task.patch.cut
    held = {name: _leaf(value, name in model.trainable) for name, value in task.patch.values.items()}
    optimiser = _Optimiser(method, held, local.rate(task.round))
    total, examples = 0.0, 0
    with task.seeds.scope("layers", client=task.client.id, round=task.round):
        for step, batch in enumerate(batches(local, task, data, skip_single=bool(model.statistics))):
            cuts = method.step_cuts(task, step, model)
            leaves = [held if inner == cut else _leaves(model, held, cut, inner) for inner in cuts]
            outputs = [
                method.forward(values, inner, batch, task, model)
                for values, inner in zip(leaves, cuts, strict=True)
            ]
            loss = method.loss(outputs, batch, task, model)
            if not math.isfinite(value := loss.item()):
                raise Diverged(f"the loss of client {task.client.id} became {value} in step {step}")
            loss.backward()
            optimiser.step(model, cut, cuts, leaves)
            count = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
            total, examples = total + value * count, examples + count
    values = {name: value.detach().contiguous() for name, value in held.items() if name in task.reply.names}
    return Patch(values, cut), {"loss": total / max(1, examples), "examples": float(examples)}


def batches(local: LocalTraining, task: Task, data: Examples, *, skip_single: bool) -> Iterator[Batch]:
    """Shuffled batches for the given number of epochs or steps.

    A remainder of one example is left out where ``skip_single`` is set: batch norm has no variance to divide by.
    """
    order = task.seeds.torch("batches", client=task.client.id, round=task.round)
    augment = task.seeds.torch("augment", client=task.client.id, round=task.round)
    step, epoch = 0, 0
    while epoch < local.epochs if local.steps is None else step < local.steps:
        for chosen in torch.randperm(len(data), generator=order).split(local.batch_size):
            if local.steps is not None and step >= local.steps:
                return
            if skip_single and len(chosen) == 1:
                continue
            yield data.take(chosen, generator=augment)
            step += 1
        epoch += 1
        if step == 0:
            raise Diverged(f"client {task.client.id} has {len(data)} example(s): too few for one batch")


def _leaf(value: Tensor, trainable: bool) -> Tensor:
    """A copy to train on; convolutions run faster in channels-last layout."""
    four = value.dim() == 4
    copied = value.detach().clone(memory_format=torch.channels_last if four else torch.contiguous_format)
    return copied.requires_grad_(trainable)


def _leaves(model: ElasticModel, held: Weights, outer: Cut, inner: Cut) -> Weights:
    """Leaf copies at a cut inside the held one; running statistics of other widths are not theirs."""
    table = model.inside(outer, inner)
    return {
        name: gather(value.detach(), table[name]).requires_grad_(value.requires_grad) if name in table else value
        for name, value in held.items()
        if name not in model.statistics
    }


class _Optimiser:
    """SGD on held weights whose gradients may belong to a part of them.

    What momentum and weight decay do to coordinates outside a step's cuts is the method's ``inactive`` policy: ``"held"``
    moves everything that the client holds, ``"active"`` only what took part in the step. Without momentum and decay
    the two are the same, and only the part is touched.
    """

    def __init__(self, method: Method, held: Weights, rate: float) -> None:
        self.local, self.rate = method.local, rate
        self.held = {name: value for name, value in held.items() if value.requires_grad}
        self.momenta: dict[str, Tensor | None] = dict.fromkeys(self.held)
        self.still = method.local.momentum == 0 and method.local.weight_decay == 0
        self.only_active = method.inactive == "active" or self.still

    @torch.no_grad()
    def step(self, model: ElasticModel, outer: Cut, cuts: list[Cut], leaves: list[Weights]) -> None:
        """Apply the gradients that ``backward`` left on the leaves."""
        widest = _widest(cuts) if self.only_active else outer
        if widest is None:
            # Moving everything held is the same as moving the cuts alone only as long as nothing else moves it.
            require(self.still, "step_cuts", cuts, "cuts inside one another, where inactive coordinates must rest")
            widest = outer
        gradients = self._collect(model, widest, cuts, leaves)
        if self.local.clip_norm < math.inf:
            clip_grad_norm_(_with_gradients(gradients), self.local.clip_norm)
        table = None if widest == outer else model.inside(outer, widest)
        names = list(gradients)
        weights = [self.held[n] if table is None else gather(self.held[n], table[n]) for n in names]
        momenta = [self._momentum(n, table and table[n]) for n in names]
        sgd(
            weights, [gradients[n] for n in names], momenta,
            weight_decay=self.local.weight_decay, momentum=self.local.momentum, lr=self.rate, dampening=0.0,
            nesterov=self.local.nesterov, maximize=False, foreach=True,
        )    # fmt: skip
        for name, weight, momentum in zip(names, weights, momenta, strict=True):
            self._write(name, table and table[name], weight, momentum)

    def _collect(self, model: ElasticModel, widest: Cut, cuts: list[Cut], leaves: list[Weights]) -> Weights:
        """Sum the gradients of all cuts into tensors of the widest one, and clear them."""
        total: Weights = {}
        seen: set[int] = set()
        for inner, values in zip(cuts, leaves, strict=True):
            if id(values) in seen:    # the same leaves ran twice: their gradients are summed already
                continue
            seen.add(id(values))
            for name in self.held:
                gradient = values[name].grad if name in values else None
                if gradient is None:
                    continue
                values[name].grad = None
                if inner != widest:
                    wide = torch.zeros(model.shape(name, widest), dtype=gradient.dtype, device=gradient.device)
                    scatter(wide, model.inside(widest, inner)[name], gradient)
                    gradient = wide
                total[name] = total[name] + gradient if name in total else gradient
        return total

    def _momentum(self, name: str, where: object) -> Tensor | None:
        momentum = self.momenta[name]
        if momentum is None and where is not None and self.local.momentum > 0:
            momentum = self.momenta[name] = torch.zeros_like(self.held[name])
        return momentum if momentum is None or where is None else gather(momentum, where)    # type: ignore[arg-type]

    def _write(self, name: str, where: object, weight: Tensor, momentum: Tensor | None) -> None:
        if where is None:
            self.momenta[name] = momentum
            return
        scatter(self.held[name], where, weight)    # type: ignore[arg-type]
        if momentum is not None and self.momenta[name] is not None:
            scatter(self.momenta[name], where, momentum)    # type: ignore[arg-type]


def _widest(cuts: list[Cut]) -> Cut | None:
    """The cut of this step that holds all others, if there is one."""
    return next((cut for cut in cuts if all(cut.holds(other) for other in cuts)), None)


def _with_gradients(gradients: Weights) -> list[Tensor]:
    """Stand-ins that carry the gradients, for PyTorch's clipping function."""
    stand_ins = []
    for gradient in gradients.values():
        stand_in = torch.empty_like(gradient)
        stand_in.grad = gradient
        stand_ins.append(stand_in)
    return stand_ins
