"""What is minimised and what is reported: by name, by import path, or functions of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.importing import imported
from fedtailor.objective.losses import Loss, OnTargets, cross_entropy, is_of_torch
from fedtailor.objective.metrics import Metric, accuracy
from fedtailor.objective.tasks import OWN, TASKS, LearningTask

AUTO = "auto"
SHORT = {"MAE": "absolute error", "F1": "macro F1"}  # what metrics are called elsewhere
NAMES = (AUTO, *TASKS, OWN.name)


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is reported; both are the user's to replace."""

    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})
    task: LearningTask | None = None  # what outputs and targets mean; None: as their shapes tell

    @classmethod
    def of(
        cls,
        task: str | None = None,
        loss: Loss | str | None = None,
        metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    ) -> Objective:
        """The objective of a task by name; ``loss`` and ``metrics`` replace what is usual for it.

        >>> sorted(Objective.of("regression").metrics), Objective.of("multi-label").task.classes
        (['absolute error'], False)
        """
        if task not in (None, *NAMES):
            raise unknown("task (objective.task)", task, NAMES)
        chosen = OWN if task == OWN.name else TASKS.get(task or AUTO)
        usual = chosen or TASKS["classification"]
        minimised: Callable[..., Any] | None = usual.loss
        if loss is not None:
            minimised = _function(loss, "objective.loss", "my_module:my_loss")
        if minimised is not None and is_of_torch(minimised):
            minimised = OnTargets(minimised)
        if minimised is None:
            raise FedtailorError(f"objective.task = {OWN.name!r}: expected a loss of your own beside it")
        given = usual.usual if metrics is None else metrics
        reported = given if isinstance(given, Mapping) else {_plain(m): _metric(m, usual) for m in given}
        return cls(minimised, dict(reported), chosen)


@dataclass(frozen=True)
class ObjectiveSettings:
    """What is learnt: the kind of task, or a loss and metrics of one's own."""

    task: str = AUTO
    """classification, multi-label, regression, next-token, causal, token classification, own; auto: by the shapes."""
    loss: str = ""
    """The task's own, or the import path of a function (output, batch) -> mean: my_module:my_loss."""
    metrics: tuple[str, ...] | None = None
    """The task's usual ones; or names and import paths, the one that a run is judged by first."""

    def __post_init__(self) -> None:
        if self.task not in NAMES:
            raise unknown("task (objective.task)", self.task, NAMES)
        require(
            not self.loss or ":" in self.loss,
            "objective.loss",
            self.loss,
            "an import path such as my_module:my_loss",
        )
        require(
            self.task != OWN.name or bool(self.loss),
            "objective.task",
            self.task,
            "objective.loss beside it, your own",
        )
        usual = TASKS.get(self.task, TASKS["classification"])
        for name in self.metrics or ():
            if ":" not in name and SHORT.get(name, name) not in usual.metrics:
                raise _unknown_metric(name, usual)

    def build(self) -> Objective:
        """The objective; import paths are followed now."""
        return Objective.of(self.task, self.loss or None, self.metrics)


def _metric(name: str, task: LearningTask) -> Metric:
    if ":" in name:
        found: Metric = _function(name, "objective.metrics", "my_module:my_metric")
        return found
    if SHORT.get(name, name) not in task.metrics:
        raise _unknown_metric(name, task)
    return task.metrics[SHORT.get(name, name)]


def _unknown_metric(name: str, task: LearningTask) -> FedtailorError:
    hint = "; or an import path such as my_module:my_metric"
    return unknown(f"metric of {task.name} (objective.metrics)", name, task.metrics, hint=hint)


def _plain(name: str) -> str:
    """What a metric is called in tables: of an import path, the function's own name."""
    return SHORT.get(name, name.rpartition(":")[2])


def _function(given: Callable[..., Any] | str, what: str, example: str) -> Callable[..., Any]:
    found = imported(given, what, example) if isinstance(given, str) else given
    if not callable(found):
        raise FedtailorError(
            f"{what} = {given!r} is of type {type(found).__name__}: expected a function (output, batch)"
        )
    function: Callable[..., Any] = found
    return function
