"""The loss that a module computes by itself when it is given the targets, as Hugging Face's models do: which one it is.

It is recognised by its value on the example. Training then computes it from the answers, so that every method works
with it: also those that scale outputs, average several networks or let one teach another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.data.batches import Batch, inputs_of, target_key, target_of
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.elasticity.tracing.copies import named_tensors, weightless
from fedtailor.elasticity.tracing.example import copied
from fedtailor.errors import FedtailorError
from fedtailor.objective import TASKS, LearningTask, Objective, accuracy, cross_entropy
from fedtailor.objective.answers import answer_of, own_loss

TOLERANCE = 1e-4  # between a loss and another way to compute it
# What a loss raises on outputs and targets of other shapes or types than its own.
UNFIT = (RuntimeError, ValueError, IndexError)


def _takes(module: nn.Module, key: str) -> bool:
    """Whether a module can be given the targets; peft's wrapping hands on whatever the network inside takes."""
    unwrap = getattr(module, "get_base_model", None)
    inside = unwrap() if callable(unwrap) else module
    return key in inspect.signature(type(inside).forward).parameters


def own_objective(model: Pieces) -> Objective:
    """The objective of a module that has a loss of its own; the given one if the user said what is learnt."""
    given, example, module = model.objective, model.example, model.module
    if given.task is not None or given.loss is not cross_entropy or not isinstance(example, dict):
        return given
    key = target_key(example)
    if not _takes(module, key):
        return given
    kwargs = copied({**inputs_of(example)[1], key: target_of(example)})
    shell = weightless(module).eval()
    tensors = {name: value.detach() for name, value in named_tensors(module).items()}
    tensors.update({second: tensors[first] for second, first in model.groups.ties.items()})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = functional_call(shell, tensors, (), kwargs, tie_weights=False)
    wanted, answer = own_loss(output), answer_of(output)
    if wanted is None or not isinstance(answer, Tensor):
        return given
    task = next((task for task in _candidates(answer) if _agrees(task, answer, example, wanted)), None)
    if task is None:
        return Objective(_unknown(module, float(wanted)), {}, None)
    found = Objective.of(task.name)
    return found if given.metrics == {"accuracy": accuracy} else Objective(found.loss, given.metrics, task)


def _candidates(answer: Tensor) -> list[LearningTask]:
    """Classes first, where there are scores for classes: one for each example, or one for each position."""
    one = answer.dim() == 2
    return sorted(
        TASKS.values(), key=lambda task: task.name != ("classification" if one else "token classification")
    )


def _agrees(task: LearningTask, answer: Tensor, example: Batch, wanted: Tensor) -> bool:
    assert task.loss is not None
    if task.problem is not None and task.problem(target_of(example), tuple(answer.shape[1:])):
        return False
    try:
        found = task.loss(answer, example)
    except UNFIT:
        return False
    return bool(torch.isclose(found, wanted.reshape(()).to(found.dtype), rtol=TOLERANCE, atol=TOLERANCE))


def _unknown(module: torch.nn.Module, value: float) -> Callable[[Any, Batch], Tensor]:
    """A loss that nobody can compute from the answers alone: training is refused, tracing is not."""

    def loss(_output: Any, _batch: Batch) -> Tensor:
        raise FedtailorError(
            f"{type(module).__name__} computes a loss of its own ({value:.4g} on the example), which is that of no "
            f"task that fedtailor knows: set objective.task to {', '.join(TASKS)} (task=... in Python), or give a loss"
        )

    return loss
