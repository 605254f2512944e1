"""The steps of one client: what it holds, moved by one batch after the other.

Every step asks the method which cuts to run (``step_cuts``), runs each of them as a real small network on leaf copies
of the held weights, and writes the step back into the held slice. Where the step's cut is all that the client holds,
the held weights are the leaves and nothing is copied. (Gradients of sliced views would have the full size in autograd.)
Running statistics that the client holds for a width of their own are updated by the steps of that width alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedtailor.client.copies import Copies, Places
from fedtailor.client.precision import autocast
from fedtailor.client.recording import recorded
from fedtailor.client.stepping import HeldWeights, Stepped
from fedtailor.client.tape import Step, Tape, Tapes
from fedtailor.data.batches import Batch, batch_size, map_tensors, target_of
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Patch, Where, gather
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.elasticity.running.layout import Layouts
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task


class Training(Stepped, Protocol):
    """What the loop asks of a method; ``Method`` says what each of them means."""

    @property
    def alike(self) -> bool: ...
    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]: ...
    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any: ...
    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor: ...


class Diverged(FedtailorError):  # noqa: N818  (a result of training, not a mistake)
    """Local training left the numbers: the client is refused and the round goes on."""


class LocalSteps:
    """What one client holds, moved by one step after the other."""

    def __init__(
        self, method: Training, task: Task, model: ElasticModel, *, stays: bool = False, taped: bool = False
    ) -> None:
        """``stays``: other clients will take it over, with ``again``; ``taped``: their steps may be run from tapes."""
        self.method, self.model, self.stays = method, model, stays
        self._set_out(task)
        self.layouts = model.once("layouts", lambda: Layouts(model))
        self.layout = self.layouts.at(self.cut)
        # What belongs to a tensor of the model (``conv1.weight@basis``) is trained where that tensor is.
        own = {name: plain(name) for name in task.patch.values}
        self.held = {
            n: _leaf(value, own[n] in model.trainable, self.layout) for n, value in task.patch.values.items()
        }
        statistics = frozenset(model.statistics)
        self.tracks = bool(statistics)
        self.weights = {n: value for n, value in self.held.items() if own[n] not in statistics}
        # What a step of all that is held runs on; its tensors are moved in place
        self.own = {**self.held, **(norm.running(model, self.held, self.cut) if self.tracks else {})}
        self.copies: dict[Cut, Copies] = {}  # of cuts that steps come back to
        self.places = Places(self.weights)
        self.optimiser = HeldWeights(method, self.held, self.places)
        self.device = next((value.device for value in self.held.values()), torch.device("cpu"))
        self.mixed = method.local.precision != "float32"
        self.least = 2 if method.local.accumulate > 1 and needs_pairs(model) else 1  # examples of a part
        self.tapes = Tapes(self._recorded) if taped and self.optimiser.values else None
        # Done before the network runs, which it never does for a client whose steps all come from tapes
        self.begin: Callable[[], None] | None = None

    def again(self, method: Training, task: Task) -> bool:
        """Begin with another client's task; False where something else than numbers has changed."""
        new = task.patch.values
        if method is not self.method or any(new[n].shape != value.shape for n, value in self.held.items()):
            return False
        self._set_out(task)
        with torch.no_grad():
            torch._foreach_copy_(list(self.held.values()), [new[n] for n in self.held])
        if not self.optimiser.still:  # momentum and moments start afresh
            self.optimiser = HeldWeights(method, self.held, self.places)
        return True

    def _set_out(self, task: Task) -> None:
        """What follows from a client's task alone."""
        local = self.method.local
        self.task, self.cut = task, task.patch.cut
        self.steps = max(1, local.steps_for(task.client.num_examples))
        self.rate = local.rate(task.round) if local.same_in_round else None

    def place(self, examples: int) -> Batch | None:
        """Where a batch of so many examples is wanted, if anywhere."""
        return None if self.tapes is None else self.tapes.place(examples)

    def take(self, step: int, batch: Batch) -> float:
        """One step on one batch; returns its loss."""
        if (tape := self._tape_of(batch)) is not None:
            value = self._finite(tape.run(batch), step)
            self.optimiser.step_by(tape.gradients, self.model, self.cut, self._rate_of(step))
            return value
        self._begin()
        cuts = self.method.step_cuts(self.task, step, self.model)
        leaves = [self._leaves(cut, again=cut in cuts[:number]) for number, cut in enumerate(cuts)]
        local, value = self.method.local, 0.0
        if local.accumulate == 1:
            value = self._gradients_of(batch, 1.0, cuts, leaves, step)
        else:
            for part, share in parts_of(batch, local.accumulate, self.least):
                value += self._gradients_of(part, share, cuts, leaves, step)
        self.optimiser.step(self.model, self.cut, cuts, leaves, self._rate_of(step))
        return value

    def _rate_of(self, step: int) -> float:
        return self.method.local.rate(self.task.round, step, self.steps) if self.rate is None else self.rate

    def _finite(self, loss: float, step: int) -> float:
        if not math.isfinite(loss):
            raise Diverged(f"the loss of client {self.task.client.id} became {loss} in step {step}")
        return loss

    def _tape_of(self, batch: Batch) -> Tape | None:
        return None if self.tapes is None else self.tapes.of(batch_size(batch), batch, self._loss_of_all)

    def _begin(self) -> None:
        begin, self.begin = self.begin, None
        if begin is not None:
            begin()

    def _loss_of_all(self, batch: Batch) -> Tensor:
        """Of a step of all that is held."""
        return self._loss_of(batch, [self.cut], [self.own])

    def _recorded(self, step: Step, batch: Batch) -> Tape | None:
        self._begin()
        constants = list(self.model.constants.values())
        return recorded(step, batch, self.optimiser.values, list(self.own.values()), constants)

    def _gradients_of(
        self, part: Batch, share: float, cuts: list[Cut], leaves: list[Weights], step: int
    ) -> float:
        """Leave the gradients of a part of the batch on the leaves; returns what it adds to the loss."""
        if self.mixed:
            with autocast(self.method.local.precision, self.device):
                loss = self._loss_of(part, cuts, leaves)
        else:
            loss = self._loss_of(part, cuts, leaves)
        value = self._finite(loss.item(), step)
        (loss if share == 1 else loss * share).backward()
        return value * share

    def _loss_of(self, part: Batch, cuts: list[Cut], leaves: list[Weights]) -> Tensor:
        method, task, model = self.method, self.task, self.model
        outputs = [
            method.forward(values, cut, part, task, model) for values, cut in zip(leaves, cuts, strict=True)
        ]
        return method.loss(outputs, leaves, part, task, model)

    def trained(self) -> Patch:
        """What goes back to the server."""
        names = self.task.lease.names
        own = {n: value.detach() for n, value in self.held.items() if n in names}
        if not self.stays:
            return Patch({n: value.contiguous() for n, value in own.items()}, self.cut)
        # What is held stays with the next client, who writes to it
        if own and len({value.dtype for value in own.values()}) == 1:
            return Patch.of_row(own, self.cut)
        return Patch({n: v.clone(memory_format=torch.contiguous_format) for n, v in own.items()}, self.cut)

    def _leaves(self, inner: Cut, again: bool = False) -> Weights:
        """What one network of a step runs on: weights at its cut, and statistics only if they belong to its width.

        Networks of one step have copies of their own, also where two of them have the same cut.
        """
        if inner is self.cut:
            return self.own
        own = norm.running(self.model, self.held, inner) if self.tracks else {}
        if (
            inner.unmasked == self.cut
        ):  # single weights that it leaves out are zeros, for the method to put there
            # Running statistics without a tag are its own.
            tracked = inner == self.cut or inner.tag == self.cut.tag
            return {**(self.held if tracked else self.weights), **own}
        if inner in self.copies and not again:
            return {**self.copies[inner].filled(), **own}
        table = self.model.inside(self.cut, inner)
        leaves, places = self._gathered(inner, table), self.places.at(inner, table)
        if places is not None and not again:
            self.copies[inner] = Copies(leaves, places)
        return {**leaves, **own}

    def _gathered(self, inner: Cut, table: Mapping[str, Where]) -> Weights:
        """Copies of the weights at a cut, to train on; tensors that it keeps whole are what is held."""
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
        return leaves


def parts_of(batch: Batch, count: int, least: int = 1) -> Iterator[tuple[Batch, float]]:
    """A batch in so many parts of nearly equal size, each with its share of the examples; none below ``least``."""
    examples = batch_size(batch)
    count = max(1, min(count, examples // least))
    if count == 1:
        yield batch, 1.0
        return
    for rows in torch.arange(examples, device=target_of(batch).device).tensor_split(count):
        yield map_tensors(batch, partial(torch.index_select, dim=0, index=rows)), len(rows) / examples


def needs_pairs(model: ElasticModel) -> bool:
    """Whether a single example cannot be trained on; batch norm needs two whether or not it tracks statistics."""
    return model.once(
        "needs pairs", lambda: any(isinstance(layer, _BatchNorm) for layer in model.module.modules())
    )


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
