"""The one local training loop: small batches, small networks, small gradients.

Every step asks the method which cuts to run (``step_cuts``), runs each of them as a real small network on leaf copies
of the held weights, and writes the step back into the held slice. Where the step's cut is all that the client holds,
the held weights are the leaves and nothing is copied. (Gradients of sliced views would have the full size in autograd.)
Running statistics that the client holds for a width of their own are updated by the steps of that width alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim.sgd import sgd

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Batch, Examples, batch_size
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Patch, Where, gather, scatter
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.elasticity.running.layout import Layouts
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Task


class Training(Protocol):
    """What the loop asks of a method; ``Method`` says what each of them means."""

    @property
    def local(self) -> LocalTraining: ...
    @property
    def inactive(self) -> Literal["held", "active"]: ...
    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]: ...
    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any: ...
    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor: ...


class Diverged(FedtailorError):  # noqa: N818  (a result of training, not a mistake)
    """Local training left the numbers: the client is refused and the round goes on."""


def train(
    method: Training, task: Task, data: Examples, model: ElasticModel
) -> tuple[Patch, dict[str, float]]:
    """Train the task's patch on the client's data; returns the trained patch and the mean loss."""
    steps = LocalSteps(method, task, model)
    total, examples = 0.0, 0
    with task.seeds.scope("layers", client=task.client.id, round=task.round):
        for step, batch in enumerate(batches(method.local, task, data, skip_single=_needs_pairs(model))):
            loss, count = steps.take(step, batch), batch_size(batch)
            total, examples = total + loss * count, examples + count
    return steps.trained(), {"loss": total / max(1, examples), "examples": float(examples)}


class LocalSteps:
    """What one client holds, moved by one step after the other."""

    def __init__(self, method: Training, task: Task, model: ElasticModel) -> None:
        self.method, self.task, self.model = method, task, model
        self.cut = task.patch.cut
        self.layouts = Layouts(model)
        self.layout = self.layouts.at(self.cut)
        # What belongs to a tensor of the model (``conv1.weight@basis``) is trained where that tensor is.
        own = {name: plain(name) for name in task.patch.values}
        self.held = {
            n: _leaf(value, own[n] in model.trainable, self.layout) for n, value in task.patch.values.items()
        }
        statistics = frozenset(model.statistics)
        self.weights = {n: value for n, value in self.held.items() if own[n] not in statistics}
        self.optimiser = _Optimiser(method, self.held, method.local.rate(task.round))

    def take(self, step: int, batch: Batch) -> float:
        """One step on one batch; returns its loss."""
        cuts = self.method.step_cuts(self.task, step, self.model)
        leaves = [self._leaves(cut) for cut in cuts]
        outputs = [
            self.method.forward(values, cut, batch, self.task, self.model)
            for values, cut in zip(leaves, cuts, strict=True)
        ]
        loss = self.method.loss(outputs, leaves, batch, self.task, self.model)
        if not math.isfinite(value := loss.item()):
            raise Diverged(f"the loss of client {self.task.client.id} became {value} in step {step}")
        loss.backward()
        self.optimiser.step(self.model, self.cut, cuts, leaves)
        return value

    def trained(self) -> Patch:
        """What goes back to the server."""
        names = self.task.lease.names
        return Patch(
            {n: value.detach().contiguous() for n, value in self.held.items() if n in names}, self.cut
        )

    def _leaves(self, inner: Cut) -> Weights:
        """What one network of a step runs on: weights at its cut, and statistics only if they belong to its width."""
        own = norm.running(self.model, self.held, inner)
        if (
            inner.unmasked == self.cut
        ):  # single weights that it leaves out are zeros, for the method to put there
            tracked = (
                inner == self.cut or inner.tag == self.cut.tag
            )  # running statistics without a tag are its own
            return {**(self.held if tracked else self.weights), **own}
        table = self.model.inside(self.cut, inner)
        layout = self.layouts.at(inner)
        with torch.no_grad():
            leaves = {
                n: gather(value, table[n]) if n in table else value
                for n, value in self.weights.items()
                if n not in inner.absent
            }
            leaves |= {
                n: _leaf(value, False, layout)
                for n, value in leaves.items()
                if n in table and (layout != self.layout or not _laid_out(value, layout))
            }
        for name, leaf in leaves.items():
            leaf.requires_grad_(self.weights[name].requires_grad)
        return {**leaves, **own}


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


def _needs_pairs(model: ElasticModel) -> bool:
    """Whether a single example cannot be trained on; batch norm needs two whether or not it tracks statistics."""
    return any(isinstance(layer, _BatchNorm) for layer in model.module.modules())


def _leaf(value: Tensor, trainable: bool, layout: torch.memory_format) -> Tensor:
    """A copy to train on; only a copy changes the strides of 1 x 1 weights, which are right for both layouts."""
    images = value.dim() == 4
    copied = value.detach().clone(memory_format=layout if images else torch.contiguous_format)
    return copied.requires_grad_(trainable)


def _laid_out(value: Tensor, layout: torch.memory_format) -> bool:
    """Whether a gathered tensor is in the layout to train in: listed positions are gathered into the ordinary one.

    Strides decide: PyTorch calls a tensor with one input channel contiguous in both layouts, but runs it in the other.
    """
    if value.dim() != 4 or layout != torch.channels_last:
        return True
    return value.stride(1) == 1 and value.stride(3) == value.shape[1]


class _Optimiser:
    """SGD on held weights whose gradients may belong to a part of them.

    What momentum, weight decay and the proximal term do to coordinates outside a step's cuts is the method's
    ``inactive`` policy: ``"held"`` moves everything that the client holds, ``"active"`` only what took part in the
    step. Without the three the policies are the same, and only the part is touched.
    """

    def __init__(self, method: Training, held: Weights, rate: float) -> None:
        self.local, self.rate = method.local, rate
        self.held = {name: value for name, value in held.items() if value.requires_grad}
        self.momenta: dict[str, Tensor | None] = dict.fromkeys(self.held)
        proximal = method.local.proximal > 0
        self.start = {name: value.detach().clone() for name, value in self.held.items()} if proximal else {}
        self.still = method.local.momentum == 0 and method.local.weight_decay == 0 and not proximal
        self.only_active = method.inactive == "active" or self.still

    @torch.no_grad()
    def step(self, model: ElasticModel, outer: Cut, cuts: list[Cut], leaves: list[Weights]) -> None:
        """Apply the gradients that ``backward`` left on the leaves."""
        widest, values = self._moved(outer, cuts, leaves)
        table = None if widest == outer else model.inside(outer, widest)
        gradients = self._collect(model, widest, cuts, leaves)
        weights = {name: values[name] for name in gradients}
        if self.start:
            self._pull_back(gradients, weights, table)
        if self.local.clip_norm < math.inf:
            clip_grad_norm_(_with_gradients(gradients), self.local.clip_norm)
        momenta = [self._momentum(name, table) for name in gradients]
        sgd(
            list(weights.values()), list(gradients.values()), momenta,
            weight_decay=self.local.weight_decay, momentum=self.local.momentum, lr=self.rate, dampening=0.0,
            nesterov=self.local.nesterov, maximize=False, foreach=True,
        )  # fmt: skip
        for (name, weight), momentum in zip(weights.items(), momenta, strict=True):
            self._write(name, table, weight, momentum)

    def _moved(self, outer: Cut, cuts: list[Cut], leaves: list[Weights]) -> tuple[Cut, Weights]:
        """The smallest cut that holds all that a step moves, and its weights: the step's copies, or what is held."""
        if self.only_active:
            for cut, values in zip(cuts, leaves, strict=True):
                if all(cut.holds(other) for other in cuts):
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
            for name in self.held:
                gradient = values[name].grad if name in values else None
                if gradient is None:
                    continue
                values[name].grad = None  # two cuts may share a leaf, which has their sum already
                if inner.unmasked != widest:
                    wide = torch.zeros(
                        model.shape(name, widest), dtype=gradient.dtype, device=gradient.device
                    )
                    scatter(wide, model.inside(widest, inner)[name], gradient)
                    gradient = wide
                total[name] = total[name] + gradient if name in total else gradient
        return total

    def _pull_back(self, gradients: Weights, weights: Weights, table: dict[str, Where] | None) -> None:
        """The gradient of FedProx's term: mu * (w - w_round)."""
        for name, gradient in gradients.items():
            start = self.start[name] if table is None else gather(self.start[name], table[name])
            gradient.add_(weights[name] - start, alpha=self.local.proximal)

    def _momentum(self, name: str, table: dict[str, Where] | None) -> Tensor | None:
        momentum = self.momenta[name]
        if table is None or self.local.momentum == 0:
            return momentum
        if momentum is None:
            momentum = self.momenta[name] = torch.zeros_like(self.held[name])
        return gather(momentum, table[name])

    def _write(
        self, name: str, table: dict[str, Where] | None, weight: Tensor, momentum: Tensor | None
    ) -> None:
        if table is None:
            self.momenta[name] = momentum
            return
        scatter(self.held[name], table[name], weight)
        kept = self.momenta[name]
        if momentum is not None and kept is not None:
            scatter(kept, table[name], momentum)


def _with_gradients(gradients: Weights) -> list[Tensor]:
    """Stand-ins that carry the gradients, for PyTorch's clipping function."""
    stand_ins = []
    for gradient in gradients.values():
        stand_in = torch.empty_like(gradient)
        stand_in.grad = gradient
        stand_ins.append(stand_in)
    return stand_ins
