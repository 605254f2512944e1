"""What outputs and targets mean: kinds of tasks by name, each with its loss, its metrics and checks of the targets.

Whoever needs class labels (label rows and the masked loss of HeteroFL), or lets one network teach another (FjORD,
FedCS), asks the task and not the type of the targets: a multi-hot table holds integers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedtailor.data.batches import Batch
from fedtailor.data.sources import UNLABELLED
from fedtailor.errors import FedtailorError
from fedtailor.objective import losses, metrics, summed
from fedtailor.objective.losses import Loss, Teaching
from fedtailor.objective.metrics import Metric

Shape = tuple[int, ...]
Check = Callable[
    [Tensor, Shape], str
]  # (all targets, one example's output) -> what is wrong with them, or ""


@dataclass(frozen=True)
class LearningTask:
    """A kind of task. ``classes``: every answer is one of the classes on the last axis of the outputs."""

    name: str
    summary: str
    classes: bool = False
    loss: Loss | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # all that are known by name
    usual: tuple[str, ...] = ()  # those that are reported if nothing else is asked for
    teach: Teaching | None = None  # how one network learns from the answers of another
    problem: Check | None = None

    def check(self, targets: Tensor, output: Shape, where: str) -> None:
        """Refuse targets that do not fit the task or the module's outputs."""
        problem = self.problem(targets, output) if self.problem is not None and len(targets) else ""
        if problem:
            raise FedtailorError(f"objective.task = {self.name!r}, but the targets of {where} {problem}")

    def check_teaching(self, method: str, way_out: str) -> None:
        """Refuse a method in which one network teaches another, where it is not known what their outputs mean."""
        if self.teach is None:
            raise FedtailorError(
                f"method {method} lets one network learn from the answers of another, and nothing says what the "
                f"outputs mean: set objective.task to {', '.join(TASKS)} (task=... in Python), or {way_out}"
            )

    def taught(self, student: Any, teacher: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
        """The loss of a network against the answers of another, which gets no gradient."""
        assert self.teach is not None, "refused before the run"
        return self.teach(student, teacher, batch, temperature)


def _classes_problem(targets: Tensor, output: Shape) -> str:
    if targets.is_floating_point():
        advice = advice_for_classes(targets, output)
        return f"are of type {_kind(targets)}: expected whole numbers, the classes" + (
            f"; {advice}" if advice else ""
        )
    if tuple(targets.shape[1:]) != output[:-1]:
        return (
            f"have the shape {_each(targets)} and the outputs {_of(output)}: expected one class for every list of "
            "scores, which is the outputs' last axis"
        )
    wrong = (targets < 0) & (targets != UNLABELLED) | (targets >= output[-1])
    return _first(wrong, targets, f"0 to {output[-1] - 1}, as the model has {output[-1]} outputs")


def advice_for_classes(targets: Tensor, output: Shape) -> str:
    """How targets become classes, where they look like classes in another spelling; else ""."""
    whole = bool((targets == targets.round()).all()) if targets.is_floating_point() else True
    if len(output) != 1 or output[0] < 2 or not whole or not len(targets):
        return ""
    each = tuple(targets.shape[1:])
    if each == output and bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all()):
        return "pass y.argmax(1), as they look one-hot"
    inside = bool((targets >= 0).all()) and bool((targets < output[0]).all())
    if each == (1,) and inside:
        return "leave out the last axis, y.squeeze(1)" + (".long()" if targets.is_floating_point() else "")
    return "pass whole numbers, y.long()" if each == () and inside and targets.is_floating_point() else ""


def _one_class_problem(targets: Tensor, output: Shape) -> str:
    if targets.dim() > 1:
        hint = advice_for_classes(targets, output) or "token classification or multi-label?"
        return f"have the shape {_each(targets)}: expected one class per example ({hint})"
    if bool((targets == UNLABELLED).any()):
        return f"hold {UNLABELLED}, which only positions of sequences may"
    return _classes_problem(targets, output)


def _positions_problem(targets: Tensor, output: Shape) -> str:
    if targets.dim() < 2:
        return "are one number per example: expected a class for every position (classification?)"
    unlabelled = (targets == UNLABELLED).reshape(len(targets), -1).all(dim=1)
    if bool(unlabelled.any()):
        return (
            f"have no label at any position of example {int(unlabelled.nonzero()[0])}: expected at least one"
        )
    return _classes_problem(targets, output)


def _labels_problem(targets: Tensor, output: Shape) -> str:
    if problem := _shape_problem(targets, output, "0 or 1 for every output"):
        return problem
    return _first(~((targets >= 0) & (targets <= 1)), targets, "0 or 1 for every label")


def _values_problem(targets: Tensor, output: Shape) -> str:
    if problem := _shape_problem(targets, output, "a number for every output"):
        return problem
    return _first(~targets.isfinite(), targets, "finite numbers")


def _first(wrong: Tensor, targets: Tensor, expected: str) -> str:
    """The first value that is wrong, and whose it is."""
    if not bool(wrong.any()):
        return ""
    place = int(wrong.reshape(len(targets), -1).any(dim=1).nonzero()[0])
    return f"hold {targets[wrong][0].item():g} (example {place}): expected {expected}"


def _shape_problem(targets: Tensor, output: Shape, expected: str) -> str:
    fits = output in (tuple(targets.shape[1:]), (*targets.shape[1:], 1))
    return (
        "" if fits else f"have the shape {_each(targets)} and the outputs {_of(output)}: expected {expected}"
    )


def _kind(targets: Tensor) -> str:
    return str(targets.dtype).removeprefix("torch.")


def _each(targets: Tensor) -> str:
    return _of(tuple(targets.shape[1:]))


def _of(shape: Shape) -> str:
    return str(tuple(shape))


_OF_CLASSES: Mapping[str, Metric] = {
    "accuracy": metrics.accuracy,
    "top-5 accuracy": metrics.top_5_accuracy,
    "macro F1": summed.macro_f1,
    "perplexity": summed.perplexity,
}

TASKS = {
    task.name: task
    for task in (
        LearningTask(
            "classification", "one class per example", True,
            losses.cross_entropy, _OF_CLASSES, ("accuracy",), losses.teach_classes, _one_class_problem,
        ),
        LearningTask(
            "multi-label", "labels that hold or do not, each by itself: 0 or 1 for every output", False,
            losses.binary_cross_entropy,
            {
                "label accuracy": metrics.label_accuracy, "exact match": metrics.exact_match,
                "macro F1": summed.label_macro_f1, "micro F1": summed.label_micro_f1,
            },
            ("label accuracy", "exact match"), losses.teach_labels, _labels_problem,
        ),
        LearningTask(
            "regression", "a number for every output", False,
            losses.squared_error, {"absolute error": metrics.absolute_error}, ("absolute error",),
            losses.teach_values, _values_problem,
        ),
        LearningTask(
            "next-token", "the next symbol, after the text or after each of its positions", True,
            losses.cross_entropy, _OF_CLASSES, ("accuracy", "top-5 accuracy"), losses.teach_classes, _classes_problem,
        ),
        LearningTask(
            "causal", f"the next token at each position of texts, their own targets; {UNLABELLED}: no label", True,
            losses.next_token_cross_entropy,
            {
                "accuracy": metrics.next_accuracy, "top-5 accuracy": metrics.top_5_next_accuracy,
                "perplexity": summed.next_perplexity,
            },
            ("accuracy", "top-5 accuracy"), losses.teach_classes, _positions_problem,
        ),
        LearningTask(
            "token classification", f"one class for every position of a sequence; {UNLABELLED}: no label", True,
            losses.cross_entropy, _OF_CLASSES, ("accuracy",), losses.teach_classes, _positions_problem,
        ),
    )
}  # fmt: skip
OWN = LearningTask("own", "a loss of the user's own: nothing is taken for granted of outputs and targets")


def told_by_shapes(output: Any, target: Tensor) -> LearningTask:
    """The task of whole-number targets with a list of scores each; of everything else nothing is known."""
    if not isinstance(output, Tensor) or target.is_floating_point() or output.dim() < 2:
        return OWN
    if output.shape[:-1] != target.shape or output.shape[-1] < 2:
        return OWN
    return TASKS["classification" if target.dim() == 1 else "token classification"]
