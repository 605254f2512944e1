"""What is learnt: whether data, outputs and the task fit each other, before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedtailor.data.batches import Examples, target_of
from fedtailor.data.datasets import Dataset
from fedtailor.data.federated import FederatedData
from fedtailor.data.formats.images import channels_last, only_input
from fedtailor.data.sources import looks_like_quantity
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.tracing.recorder import ExampleError
from fedtailor.errors import FedtailorError
from fedtailor.objective import OWN, TASKS, LearningTask, Objective, cross_entropy
from fedtailor.objective.losses import OnTargets
from fedtailor.objective.tasks import advice_for_classes

SEEN = 64  # examples whose prepared targets are looked at


def check_task(model: ElasticModel, data: FederatedData) -> None:
    """The targets must fit the task and the outputs; without a task and a loss of one's own they must be classes."""
    task, targets = model.learning_task, data.train.targets
    if task == OWN:
        if model.objective.loss is cross_entropy:
            raise FedtailorError(_no_classes(targets, model.output, data.name))
        return
    if not isinstance(model.output, torch.Tensor):
        raise FedtailorError(
            f"objective.task = {task.name!r}: expected a module that returns one tensor, this one returns a "
            f"{type(model.output).__name__}; set objective.task = 'own' and give a loss of your own"
        )
    shape = tuple(model.output.shape[1:])
    task.check(_as_seen(data.train), shape, f"{data.name} (train)")
    task.check(_as_seen(data.test), shape, f"{data.name} (test)")


def _as_seen(examples: Examples) -> torch.Tensor:
    """All targets as they rest; of those that a preparation makes others of (a symbol for every position), some."""
    resting = examples.targets
    if examples.preparation is None or len(examples) == 0:
        return resting
    seen = target_of(examples.take(torch.arange(min(SEEN, len(examples)))))
    return resting if seen.shape[1:] == resting.shape[1:] else seen


def check_loss(model: ElasticModel) -> None:
    """A loss of the user's own is tried on the example batch: what it does not take is said before anything trains."""
    loss = model.objective.loss
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    if getattr(loss, "__module__", "").startswith("fedtailor.") and not isinstance(loss, OnTargets):
        return
    try:
        with torch.no_grad():
            found = loss(model.output, model.example)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise FedtailorError(
            f"objective.loss = {name}: {type(error).__name__} on the example batch: {error}. A loss takes (output, "
            "batch), where the batch is what the data holds, with the target last: "
            "lambda output, batch: F.cross_entropy(output, batch[-1])"
        ) from error
    if not (isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point()):
        what = f"a tensor {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise FedtailorError(
            f"objective.loss = {name} returned {what}: expected one number, the mean over the batch"
        )


def _no_classes(targets: torch.Tensor, output: object, name: str) -> str:
    shape = "x".join(map(str, targets.shape[1:])) or "one"
    kind = str(targets.dtype).removeprefix("torch.")
    likely = "multi-label" if bool(((targets == 0) | (targets == 1)).all()) else "regression"
    others = ", ".join(other for other in TASKS if other != likely)
    scores = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else ()
    advice = advice_for_classes(targets, scores)
    meant = f"if they are meant as classes, {advice}; if not, " if advice else ""
    return (
        f"the targets of {name} ({shape} {kind} per example) are no classes of the "
        f"model's outputs: {meant}set objective.task = {likely!r} (task={likely!r} in Python), or {others}; or give a "
        "loss of your own"
    )


@contextmanager
def explained(data: FederatedData) -> Iterator[None]:
    """Trace a module inside; an input that it fails on gets the guess why, as far as shape and type tell."""
    try:
        yield
    except ExampleError as error:
        guess = _guess(data, str(error))
        if not guess:
            raise
        raise ExampleError(f"{error}. {guess}") from error


def _guess(data: FederatedData, said: str) -> str:
    x, images = only_input(data.train), "Conv2d" in said
    if x is None or data.train.preparation is not None:
        return ""
    each = tuple(x.shape[1:])
    if x.dim() == 1 and not x.is_floating_point() and data.train.targets.dim() > 1:
        return "Is it (y, x)? Expected (x, y): the targets come last"
    if "index out of range" in said and not x.is_floating_point():
        most = int(x.max())
        return f"The inputs go up to {most}: an nn.Embedding needs at least {most + 1} rows for them"
    if channels_last(x.shape):
        turned = "x.permute(0, 3, 1, 2), of an array x.transpose(0, 3, 1, 2),"
        return f"The inputs are {each}: channels last? {turned} puts channels first"
    if x.dtype == torch.uint8:
        return (
            "The inputs are bytes (uint8): divide them by 255, x / 255, or normalise them batch by batch, "
            "Examples.of(x, y, preparation=ImagePreparation(mean, std)); train(module, (x, y)) does so by itself"
        )
    return (
        f"The inputs are {each}: no axis of channels? x[:, None] adds one"
        if images and len(each) == 2
        else ""
    )


def of_task(dataset: Dataset, task: LearningTask | None) -> Dataset:
    """A data set of whole numbers has classes only if the task does: they may be multi-hot labels, or ages."""
    if task is None or task.classes:
        return dataset
    origin = dataset.origin
    if origin.taken_for and dataset.num_classes:
        said = f"{origin.taken_for} But objective.task = {task.name!r}: the labels are no classes."
        origin = dataclasses.replace(origin, taken_for=said)
    several = dataset.train.targets.dim() > 1  # whose labels are named by their columns
    names = dataset.label_names if several else ()
    return dataclasses.replace(dataset, num_classes=0, label_names=names, origin=origin)


def outputs_for(data: FederatedData, objective: Objective) -> int:
    """How many outputs a network needs: one for each class, or for each number of a target.

    Whole numbers that are clearly no classes are refused where nobody said that they are.
    """
    targets = data.train.targets
    told = objective.task is not None or objective.loss is not cross_entropy
    tokens = data.origin.symbols is not None and data.num_classes <= data.origin.symbols
    if data.num_classes and not (told or tokens) and (quantity := looks_like_quantity(targets)):
        raise FedtailorError(
            f"the targets of {data.name} {quantity}; objective.task = 'classification' takes them as they are"
        )
    return data.num_classes or (int(targets.shape[-1]) if targets.dim() > 1 else 1)


def too_few_outputs(outputs: int, data: FederatedData) -> FedtailorError:
    """The error for labels that a network has no outputs for, with the likely reason."""
    targets = data.train.targets
    lowest = int(targets.min())
    quantity = looks_like_quantity(targets)
    if quantity:
        reason = f"; they {quantity}"
    elif lowest > 0 and data.num_classes - lowest <= outputs:
        of_table = ', or of a table options = { targets = "names" }' if data.origin.columns else ""
        reason = f"; they start at {lowest}: subtract {lowest} (y - {lowest}){of_table}"
    else:
        reason = f"; expected at least {data.num_classes} outputs, or labels from 0 to {outputs - 1}"
    return FedtailorError(
        f"the model has {outputs} outputs, but the labels of {data.name} go up to {data.num_classes - 1}{reason}"
    )


def report_what_is_known(model: ElasticModel) -> None:
    """Of outputs that mean nothing known, report the loss alone: nobody knows whether they are right."""
    if model.learning_task == OWN:
        model.objective = dataclasses.replace(model.objective, metrics={})
