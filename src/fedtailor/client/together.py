"""Many tiny clients of one piece as one batch of networks: a step of all of them is a few large operations.

The clients' weights are stacked, (clients, ...), and ``torch.func.vmap`` runs the method's own forward pass and loss on
them; nothing passes from one client to another. Each takes the batches that it would take alone, so results differ from
those of single clients by rounding alone. Clients whose batches have other sizes, or who are through, step by
themselves or rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.optim.sgd import sgd

from fedtailor.client.gathering import Table, stacked
from fedtailor.client.local_steps import Diverged, Training, needs_pairs
from fedtailor.client.local_training import LocalTraining
from fedtailor.client.recording import each_its_own, recorded
from fedtailor.client.stepping import decay_groups
from fedtailor.client.tape import Step, Tape, Tapes
from fedtailor.client.training import Left, is_repeatable_model, piece_of, runs, steps_alike
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import FedtailorError, require
from fedtailor.messages import Client, Lease, Task
from fedtailor.seeds import Seeds
from fedtailor.steps import phase


class Together(Training, Protocol):
    """What is asked of a method before many of its clients are trained at once."""

    @property
    def name(self) -> str: ...


MOST_OF_A_FLOCK = 2**25  # bytes of weights, to be kept for the next one

Trained = tuple[Patch, dict[str, float]]
Steps = tuple[int, float]  # examples of a batch, and the rate: what clients that step together share


def train_together(
    method: Training, tasks: Sequence[Task], data: Sequence[Examples], model: ElasticModel
) -> list[Trained | Diverged]:
    """What ``training.train`` makes of each task; all of them carry one patch. Who left the numbers is among them."""
    single = needs_pairs(model)
    waiting = {
        number: runs(method.local, task, own, skip_single=single)
        for number, (task, own) in enumerate(zip(tasks, data, strict=True))
    }
    with kept(method, tasks, model) as flock:
        table, step = Table(tasks, data), 0
        with phase("steps"):
            while waiting:
                for (examples, rate), those in _side_by_side(flock, waiting, step).items():
                    place = flock.tapes.place(examples) if len(those) == len(tasks) else None
                    flock.take(step, list(those), table.batch(those, place), rate)
                step += 1
        return flock.outcomes()


@contextmanager
def kept(method: Training, tasks: Sequence[Task], model: ElasticModel) -> Iterator[_Flock]:
    """A flock for these tasks: the tensors and tapes of the last one of its size and piece, if there was one."""
    known: Left[_Flock] = model.once("flocks", Left)
    place = piece_of(tasks[0]), len(tasks)
    flock = known.taken(place)
    if flock is None or not flock.again(method, tasks):
        flock = _Flock(method, tasks, model)
    yield flock
    if steps_alike(method) and tasks[0].patch.nbytes * len(tasks) <= MOST_OF_A_FLOCK:
        known.leave(place, flock)


def _side_by_side(
    flock: _Flock, waiting: dict[int, Iterator[Tensor]], step: int
) -> dict[Steps, dict[int, Tensor]]:
    """The rows of the next batches of those who have any, by what they share; the others wait no longer."""
    found: dict[Steps, dict[int, Tensor]] = {}
    for number in list(waiting):
        try:
            # Who has left the numbers goes on among the others: stacks of another size may be rounded otherwise.
            rows = next(waiting[number], None)
        except Diverged as error:  # too few examples for a batch
            flock.lost[number], rows = error, None
        if rows is None:
            del waiting[number]
        else:
            found.setdefault((rows.shape[0], flock.rate(number, step)), {})[number] = rows
    return found


class _Flock:
    """What all clients hold, stacked, and moved by one step after the other."""

    def __init__(self, method: Training, tasks: Sequence[Task], model: ElasticModel) -> None:
        self.method, self.model, self.local = method, model, method.local
        self._begin(tasks)
        size, on_cpu = len(tasks), all(value.device.type == "cpu" for value in self.start.values())
        wide = {n: value.expand(size, *value.shape) for n, value in self.start.items()}
        orders = model.once(("order of gradients", piece_of(tasks[0])), self._orders)
        # Weights lie as their gradients come: a step moves memory of one order by memory of the same
        self.held = {n: _ordered(value, orders.get(n)).requires_grad_() for n, value in wide.items()}
        moving = self.local.momentum > 0
        self.momenta = {n: torch.zeros_like(value) for n, value in self.held.items()} if moving else {}
        self.groups = decay_groups(self.local, self.start)
        self.everyone = list(range(size))
        self.losses = torch.empty(0)  # of the step that was taken last
        self.losses_of: dict[int, Tensor] = {}  # where tapes leave theirs, by the tape
        taped = on_cpu and steps_alike(method) and is_repeatable_model(model)
        self.tapes = Tapes(self._recorded if taped else lambda *_: None, size)

    def _begin(self, tasks: Sequence[Task]) -> None:
        patch, size = tasks[0].patch, len(tasks)
        self.tasks, self.cut = tasks, patch.cut
        self.fixed = {n: value for n, value in patch.values.items() if n not in self.model.trainable}
        self.start = {n: value.detach() for n, value in patch.values.items() if n in self.model.trainable}
        self.lost: list[Diverged | None] = [None] * size
        self.totals, self.examples = [0.0] * size, [0] * size
        self.same_rate = self.local.rate(tasks[0].round) if self.local.same_in_round else None

    def again(self, method: Training, tasks: Sequence[Task]) -> bool:
        """Begin with other clients; False where something else than numbers has changed."""
        new = tasks[0].patch.values
        if method is not self.method or any(
            new[n].shape != value.shape[1:] for n, value in self.held.items()
        ):
            return False
        if self.fixed:  # a tape has those of its own time
            return False
        self._begin(tasks)
        with torch.no_grad():
            for name, value in self.held.items():  # first one of the same order in memory: four times as fast
                value.copy_(torch.empty_like(value[0]).copy_(self.start[name]))
            for momentum in self.momenta.values():
                momentum.zero_()
        return True

    def rate(self, number: int, step: int) -> float:
        """The learning rate of a client's step."""
        task = self.tasks[number]
        if self.same_rate is not None:
            return self.same_rate
        return self.local.rate(task.round, step, max(1, self.local.steps_for(task.client.num_examples)))

    def take(self, step: int, rows: list[int], batch: Batch, rate: float) -> None:
        """One step of these clients, each on its part of the batch."""
        all_of_them = rows == self.everyone
        tape = self.tapes.of(_examples_of_one(batch), batch, self._total) if all_of_them else None
        places = torch.tensor(rows)
        held, momenta = (
            each if all_of_them else {n: value.index_select(0, places) for n, value in each.items()}
            for each in (self.held, self.momenta)
        )
        if tape is not None:
            tape.run(batch)
            self.losses = self.losses_of[id(tape)]
            gradients = dict(zip(self.held, tape.gradients, strict=True))
        else:
            gradients = self._gradients(held, batch)
        self._note(step, rows, _examples_of_one(batch))
        with torch.no_grad():
            self._move(held, momenta, gradients, rate)
            if not all_of_them:
                for whole, part in ((self.held, held), (self.momenta, momenta)):
                    for name, value in part.items():
                        whole[name].index_copy_(0, places, value)

    def _gradients(self, held: Weights, batch: Batch) -> Weights:
        leaves = {n: value.detach().requires_grad_() for n, value in held.items()}
        found = torch.autograd.grad(self._sum(leaves, batch), list(leaves.values()), allow_unused=True)
        gradients = {n: value for n, value in zip(leaves, found, strict=True) if value is not None}
        return dict(zip(gradients, each_its_own(list(gradients.values())), strict=True))

    def _sum(self, leaves: Weights, batch: Batch) -> Tensor:
        """Of the losses of all clients, whose gradient is each one's own."""
        losses = vmap(self._loss)(leaves, batch)
        self.losses = losses.detach()
        return losses.sum()

    def _total(self, batch: Batch) -> Tensor:
        return self._sum(self.held, batch)

    def _recorded(self, step: Step, batch: Batch) -> Tape | None:
        held = list(self.held.values())
        constants = list(self.model.constants.values())
        tape = recorded(step, batch, held, held, constants, len(self.tasks))
        self.losses_of[id(tape)] = self.losses
        return tape

    def _orders(self) -> dict[str, list[int]]:
        """The axes of gradients, the one with the longest stride first: they follow from the network, not from data."""
        two = {n: value.expand(2, *value.shape) for n, value in self.start.items()}
        gradients = self._gradients(two, stacked([self.model.example] * 2))
        return {
            n: sorted(range(each.dim()), key=lambda axis: -each.stride()[axis])
            for n, each in gradients.items()
        }

    def _loss(self, weights: Weights, batch: Batch) -> Tensor:
        """Of one client; what belongs to clients alone the method does not look at (``Method.alike``)."""
        task, values = self.tasks[0], {**self.fixed, **weights}
        output = self.method.forward(values, self.cut, batch, task, self.model)
        return self.method.loss([output], [values], batch, task, self.model)

    def _note(self, step: int, rows: list[int], examples: int) -> None:
        for number, value in zip(rows, self.losses.tolist(), strict=True):
            if not math.isfinite(value) and self.lost[number] is None:
                client = self.tasks[number].client.id
                self.lost[number] = Diverged(f"the loss of client {client} became {value} in step {step}")
            self.totals[number] += value * examples
            self.examples[number] += examples

    def _move(self, held: Weights, momenta: Weights, gradients: Weights, rate: float) -> None:
        """SGD on stacked weights, as ``stepping`` does it on those of one client."""
        if self.local.proximal > 0:
            for name, gradient in gradients.items():
                gradient.add_(held[name] - self.start[name], alpha=self.local.proximal)
        if self.local.clip_norm < math.inf:
            _clip(list(gradients.values()), self.local.clip_norm)
        for names, decay in self.groups:
            moved = [name for name in names if name in gradients]
            sgd(
                [held[name] for name in moved], [gradients[name] for name in moved],
                [momenta.get(name) for name in moved], weight_decay=decay, momentum=self.local.momentum, lr=rate,
                dampening=0.0, nesterov=self.local.nesterov, maximize=False, foreach=True,
            )  # fmt: skip

    def outcomes(self) -> list[Trained | Diverged]:
        """What clients send back, each with its mean loss; or that they have left the numbers."""
        examples = [max(1, each) for each in self.examples]
        return [
            lost or (patch, {"loss": self.totals[n] / examples[n], "examples": float(self.examples[n])})
            for n, (lost, patch) in enumerate(zip(self.lost, self._patches(), strict=True))
        ]

    def _patches(self) -> list[Patch]:
        sent, leased = self.tasks[0].patch.values, [task.lease.names for task in self.tasks]
        if any(names != leased[0] for names in leased):
            return [self._patch(number, names) for number, names in enumerate(leased)]
        values = {n: value for n, value in sent.items() if n in leased[0]}
        if len({value.dtype for value in values.values()}) != 1:
            return [self._patch(number, names) for number, names in enumerate(leased)]
        # All in one table, as which they travel
        size = sum(value.numel() for value in values.values())
        first = next(iter(values.values()))
        table, start = first.new_empty(len(self.tasks), size), 0
        for name, value in values.items():
            stop = start + value.numel()
            table[:, start:stop].view(-1, *value.shape).copy_(self.held.get(name, value).detach())
            start = stop
        return Patch.of_rows([table], {n: (0, value.shape) for n, value in values.items()}, self.cut)

    def _patch(self, number: int, names: frozenset[str]) -> Patch:
        values = {**self.fixed, **{n: value[number].detach().clone() for n, value in self.held.items()}}
        return Patch({n: values[n] for n in self.tasks[number].patch.values if n in names}, self.cut)


def _ordered(value: Tensor, order: Sequence[int] | None) -> Tensor:
    """A copy whose axes lie in this order in memory."""
    if order is None:
        return value.clone(memory_format=torch.contiguous_format)
    back = [order.index(axis) for axis in range(value.dim())]
    return value.permute(*order).clone(memory_format=torch.contiguous_format).permute(*back)


def _examples_of_one(batch: Batch) -> int:
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[-1]
    return int(first.shape[1])


def _clip(gradients: Sequence[Tensor], most: float) -> None:
    """Every client's gradients to a norm of at most ``most``, as PyTorch's function does it for one."""
    squares = [gradient.flatten(1).square().sum(1) for gradient in gradients]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def check_together(method: Together, model: ElasticModel) -> None:
    """Refuse, before a run starts, what cannot be trained as one batch of networks."""
    local: LocalTraining = method.local
    asked = local.together
    if asked == 1:
        return
    name = "training.together"
    require(local.is_sgd, name, asked, f"1 with training.optimiser = {local.optimiser!r}: it is for sgd")
    require(local.accumulate == 1, name, asked, f"1 with training.accumulate = {local.accumulate}")
    require(local.precision == "float32", name, asked, f"1 with training.precision = {local.precision!r}")
    require(
        method.alike,
        name,
        asked,
        f"1 with {method.name}, whose clients train in ways of their own; those of fedavg do not, nor do those of "
        "heterofl and fedrolex with masked_loss = false and label_rows = false",
    )
    try:
        _try_two(method, model)
    except (RuntimeError, ValueError) as error:  # what vmap says of layers that it cannot follow
        words = str(error).strip().partition("\n")[0]
        raise FedtailorError(
            f"{name} = {asked}: {type(model.module).__name__} cannot be trained for several clients at once ({words}); "
            "expected 1, or a network without layers that draw (dropout) or keep statistics (batch norm)"
        ) from error


def _try_two(method: Together, model: ElasticModel) -> None:
    """A step of two clients on the example that the model was traced with."""
    cut = Cut.everything()
    patch = Patch(dict(model.weights()), cut)
    task = Task(Client(0, "", Budget(), 1), 0, patch, Lease(frozenset(patch.values), cut), Seeds(0))
    _Flock(method, [task, task], model).take(0, [0, 1], stacked([model.example] * 2), rate=0.0)
