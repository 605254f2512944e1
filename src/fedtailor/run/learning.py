"""What is learnt: whether data, outputs and the task fit each other, before anything is trained."""

from __future__ import annotations

import dataclasses

import torch

from fedtailor.data.datasets import Dataset
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.objective import OWN, TASKS, Objective, cross_entropy


def check_task(model: ElasticModel, data: FederatedData) -> None:
    """The targets must fit the task and the outputs; without a task and a loss of one's own they must be classes."""
    task, targets = model.learning_task, data.train.targets
    if task == OWN:
        if model.objective.loss is cross_entropy:
            shapes = (
                f"{tuple(targets.shape[1:])} per example, of type {str(targets.dtype).removeprefix('torch.')}"
            )
            raise FedtailorError(
                f"the targets of {data.name} ({shapes}) are no classes of the model's outputs: set objective.task "
                f"(task=... in Python) to {', '.join(TASKS)}, or give a loss of your own"
            )
        return
    if not isinstance(model.output, torch.Tensor):
        raise FedtailorError(
            f"objective.task = {task.name!r}: expected a module that returns one tensor, this one returns a "
            f"{type(model.output).__name__}; set objective.task = 'own' and give a loss of your own"
        )
    shape = tuple(model.output.shape[1:])
    task.check(targets, shape, f"{data.name} (train)")
    task.check(data.test.targets, shape, f"{data.name} (test)")


def of_task(dataset: Dataset, objective: Objective) -> Dataset:
    """A data set of whole numbers has classes only if the task does: they may be multi-hot labels, or ages."""
    if objective.task is None or objective.task.classes:
        return dataset
    return dataclasses.replace(dataset, num_classes=0, label_names=())


def outputs_for(data: FederatedData) -> int:
    """How many outputs a network needs: one for each class, or for each number of a target."""
    targets = data.train.targets
    return data.num_classes or (int(targets.shape[-1]) if targets.dim() > 1 else 1)


def report_what_is_known(model: ElasticModel) -> None:
    """Of outputs that mean nothing known, report the loss alone: nobody knows whether they are right."""
    if model.learning_task == OWN:
        model.objective = dataclasses.replace(model.objective, metrics={})
