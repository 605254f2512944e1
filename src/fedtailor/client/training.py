"""The one local training loop: small batches, small networks, small gradients.

A client's steps are in ``local_steps``. Where clients of one piece differ in their examples alone, one takes over what
the last has left: its tensors, which the next client's numbers are copied to, and the tapes of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedtailor.client.local_steps import Diverged, LocalSteps, Training, needs_pairs
from fedtailor.client.local_training import LocalTraining
from fedtailor.client.repeatable import is_repeatable
from fedtailor.data.batches import Batch, Examples, batch_size
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Task
from fedtailor.steps import phase

Place = Callable[[int], Batch | None]  # where a batch of so many examples may be gathered, if anywhere

T = TypeVar("T")

MOST_PIECES = 8  # of which steps are kept between clients
MOST_KEPT = 2**23  # bytes of a piece that are: beyond, what it saves is nothing beside a step


def train(
    method: Training, task: Task, data: Examples, model: ElasticModel
) -> tuple[Patch, dict[str, float]]:
    """Train the task's patch on the client's data; returns the trained patch and the mean loss."""
    with steps_of(method, task, model) as steps:

        def begin() -> None:
            network.enter_context(task.seeds.scope("layers", client=task.client.id, round=task.round))
            network.enter_context(model.seated(steps.own, steps.cut))

        total, examples, steps.begin = 0.0, 0, begin
        own = batches(method.local, task, data, skip_single=needs_pairs(model), place=steps.place)
        with ExitStack() as network, phase("steps"):
            for step, batch in enumerate(own):
                loss, count = steps.take(step, batch), batch_size(batch)
                total, examples = total + loss * count, examples + count
        return steps.trained(), {"loss": total / max(1, examples), "examples": float(examples)}


@contextmanager
def steps_of(method: Training, task: Task, model: ElasticModel) -> Iterator[LocalSteps]:
    """What a client's steps need: where clients are alike, what the one before them of the same piece has left.

    It is nobody else's inside the block: training inside training has steps of its own.
    """
    if not come_again(method, task):
        yield LocalSteps(method, task, model)
        return
    known: Left[LocalSteps] = model.once("steps", Left)
    place = piece_of(task)
    steps = known.taken(place)
    if steps is None or not steps.again(method, task):
        steps = LocalSteps(method, task, model, stays=True, taped=is_repeatable_model(model))
    yield steps
    known.leave(place, steps)


class Left(Generic[T]):
    """What clients have left, by their pieces; a copy of the model begins without."""

    def __init__(self) -> None:
        self.pieces: dict[Hashable, T] = {}

    def __reduce__(self) -> tuple[type[Left[T]], tuple[()]]:
        return type(self), ()

    def taken(self, piece: Hashable) -> T | None:
        """What was left of a piece; whoever takes it has it alone."""
        return self.pieces.pop(piece, None)

    def leave(self, piece: Hashable, value: T) -> None:
        """For the next client; of too many pieces the one that was left first is forgotten."""
        self.pieces[piece] = value
        if len(self.pieces) > MOST_PIECES:
            self.pieces.pop(next(iter(self.pieces)))


def piece_of(task: Task) -> Hashable:
    """What makes clients take the same steps: also what does not count among cuts, as factors may depend on it."""
    cut = task.patch.cut
    return cut, cut.tag, cut.width, cut.depth, tuple(task.patch.values)


def is_repeatable_model(model: ElasticModel) -> bool:
    """Whether a step of the model that was recorded stands for others."""
    return model.once("repeatable", lambda: is_repeatable(model.module, model.objective.loss))


def come_again(method: Training, task: Task) -> bool:
    """Whether other clients are likely to take the same steps on other examples, in this process."""
    local, cut = method.local, task.patch.cut
    plain = local.accumulate == 1 and local.precision == "float32" and cut.mask is None
    if not plain or cut.width is None or not steps_alike(method):
        return False
    values = task.patch.values.values()
    return task.patch.nbytes <= MOST_KEPT and {value.device.type for value in values} == {"cpu"}


def steps_alike(method: Training) -> bool:
    """Whether a client's step depends on nothing but its weights and its batch: a user's own hooks may look at more."""
    return method.alike and _has_known_hooks(type(method))


@cache
def _has_known_hooks(kind: type[Training]) -> bool:
    hooks = (getattr(kind, name) for name in ("forward", "loss", "step_cuts"))
    return all(hook.__globals__["__name__"].startswith("fedtailor.") for hook in hooks)


def batches(
    local: LocalTraining, task: Task, data: Examples, *, skip_single: bool, place: Place | None = None
) -> Iterator[Batch]:
    """Shuffled batches for the given number of epochs or steps; ``place`` is where they are gathered, as it says.

    A remainder of one example is left out where ``skip_single`` is set: batch norm has no variance to divide by.
    """
    augment, fits = augmenting(task, data), dict[int, bool]()  # places, by the number of examples
    for rows in runs(local, task, data, skip_single=skip_single):
        count = rows.shape[0]
        where = None if place is None else place(count)
        if where is not None and count not in fits:
            fits[count] = data.fits(where)
        yield data.at(rows, generator=augment, place=where if fits.get(count) else None)


def runs(local: LocalTraining, task: Task, data: Examples, *, skip_single: bool) -> Iterator[Tensor]:
    """The rows of these batches."""
    order = task.seeds.torch("batches", client=task.client.id, round=task.round)
    step, epoch = 0, 0
    while epoch < local.epochs if local.steps is None else step < local.steps:
        shuffled = torch.randperm(len(data), generator=order)
        for rows in data.runs(shuffled, local.batch_size, skip_single=skip_single):
            yield rows
            step += 1
            if step == local.steps:
                return
        epoch += 1
        if step == 0:
            raise Diverged(f"client {task.client.id} has {len(data)} example(s): too few for one batch")


def augmenting(task: Task, data: Examples) -> torch.Generator | None:
    """What augmentation draws from: none where nothing is done to examples, as it costs as much as a short step."""
    if data.preparation is None:
        return None
    return task.seeds.torch("augment", client=task.client.id, round=task.round)
