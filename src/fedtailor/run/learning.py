"""What is learnt: whether data, outputs and the task fit each other, before anything is trained."""

from __future__ import annotations

import dataclasses

import torch

from fedtailor.data.datasets import Dataset
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.objective import OWN, TASKS, LearningTask, cross_entropy
from fedtailor.objective.losses import OnTargets


def check_task(model: ElasticModel, data: FederatedData) -> None:
    """The targets must fit the task and the outputs; without a task and a loss of one's own they must be classes."""
    task, targets = model.learning_task, data.train.targets
    if task == OWN:
        if model.objective.loss is cross_entropy:
            raise FedtailorError(_no_classes(targets, data.name))
        return
    if not isinstance(model.output, torch.Tensor):
        raise FedtailorError(
            f"objective.task = {task.name!r}: expected a module that returns one tensor, this one returns a "
            f"{type(model.output).__name__}; set objective.task = 'own' and give a loss of your own"
        )
    shape = tuple(model.output.shape[1:])
    task.check(targets, shape, f"{data.name} (train)")
    task.check(data.test.targets, shape, f"{data.name} (test)")


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


def _no_classes(targets: torch.Tensor, name: str) -> str:
    shape = "x".join(map(str, targets.shape[1:])) or "one"
    likely = "multi-label" if bool(((targets == 0) | (targets == 1)).all()) else "regression"
    others = ", ".join(other for other in TASKS if other != likely)
    kind = str(targets.dtype).removeprefix("torch.")
    return (
        f"the targets of {name} ({shape} {kind} per example) are no classes of the "
        f"model's outputs: set objective.task = {likely!r} (task={likely!r} in Python), or {others}; or give a loss of "
        "your own"
    )


def of_task(dataset: Dataset, task: LearningTask | None) -> Dataset:
    """A data set of whole numbers has classes only if the task does: they may be multi-hot labels, or ages."""
    if task is None or task.classes:
        return dataset
    origin = dataset.origin
    if origin.taken_for and dataset.num_classes:
        said = f"{origin.taken_for} But objective.task = {task.name!r}: the labels are no classes."
        origin = dataclasses.replace(origin, taken_for=said)
    return dataclasses.replace(dataset, num_classes=0, label_names=(), origin=origin)


def outputs_for(data: FederatedData) -> int:
    """How many outputs a network needs: one for each class, or for each number of a target."""
    targets = data.train.targets
    return data.num_classes or (int(targets.shape[-1]) if targets.dim() > 1 else 1)


def report_what_is_known(model: ElasticModel) -> None:
    """Of outputs that mean nothing known, report the loss alone: nobody knows whether they are right."""
    if model.learning_task == OWN:
        model.objective = dataclasses.replace(model.objective, metrics={})
