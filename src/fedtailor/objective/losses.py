"""Losses of a batch, by the labels and by a teacher's answers; all are means over the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.batches import Batch, target_of
from fedtailor.data.sources import UNLABELLED

Loss = Callable[[Any, Batch], Tensor]  # (the module's output, the batch) -> mean over the batch
Teaching = Callable[[Any, Any, Batch, float], Tensor]  # (student's output, teacher's, the batch, temperature)


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of logits (N, C) or, for sequences, (N, T, C)."""
    target = target_of(batch)
    if output.dim() == 2 and target.dim() == 1:  # as nearly always, without two views and their gradients
        return F.cross_entropy(output, target)
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def next_token_cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of logits (N, T, C) against the token that follows each position: the target is the text."""
    target = target_of(batch)[:, 1:]
    return F.cross_entropy(output[:, :-1].reshape(-1, output.shape[-1]), target.reshape(-1))


def binary_cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean over examples and labels: every output is the logit of a label that holds or does not."""
    answers, target = matched(output, batch)
    return F.binary_cross_entropy_with_logits(answers, target.to(answers.dtype))


def squared_error(output: Tensor, batch: Batch) -> Tensor:
    """Mean squared error over examples and outputs."""
    answers, target = matched(output, batch)
    return F.mse_loss(answers, target.to(answers.dtype))


def matched(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs and targets of one shape: a single one of either per example may stand on an axis of its own."""
    target = target_of(batch)
    if output.shape == (*target.shape, 1):
        return output.squeeze(-1), target
    return output, target.squeeze(-1) if target.shape == (*output.shape, 1) else target


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean cross-entropy of the student against the teacher's softened answers; classes lie on the last axis.

    Its gradient is that of KL(teacher || student), and none reaches the teacher. The factor T^2 keeps the gradient's
    size where the temperature T flattens both answers.
    """
    target = (teacher.detach() / temperature).softmax(dim=-1)
    answers, targets = (logits.reshape(-1, logits.shape[-1]) for logits in (student / temperature, target))
    return F.cross_entropy(answers, targets) * temperature**2


def teach_classes(student: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Tensor:
    """``distillation_loss``; positions without a label teach nothing."""
    target = target_of(batch)
    if target.dim() > 1 and bool((target == UNLABELLED).any()):
        labelled = target != UNLABELLED
        student, teacher = student[labelled], teacher[labelled]
    return distillation_loss(student, teacher, temperature)


def teach_labels(student: Tensor, teacher: Tensor, _batch: Batch, temperature: float) -> Tensor:
    """As ``distillation_loss``, for labels that hold or do not, each by itself."""
    target = (teacher.detach() / temperature).sigmoid()
    return F.binary_cross_entropy_with_logits(student / temperature, target) * temperature**2


def teach_values(student: Tensor, teacher: Tensor, _batch: Batch, _temperature: float) -> Tensor:
    """Mean squared distance to the teacher's values, which no temperature softens."""
    return F.mse_loss(student, teacher.detach())


@dataclass(frozen=True)
class OnTargets:
    """A loss of PyTorch's, ``(output, target)``, as one of a batch, whose target is what comes last."""

    loss: Callable[[Any, Tensor], Tensor]

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """The mean over the batch; single numbers on axes of their own meet those without, never all with all."""
        if isinstance(output, Tensor):
            return self.loss(*matched(output, batch))
        return self.loss(output, target_of(batch))


def is_of_torch(loss: object) -> bool:
    """Whether a loss is PyTorch's own, a module (``nn.HuberLoss()``) or a function (``F.l1_loss``)."""
    kind = loss if hasattr(loss, "__qualname__") else type(loss)
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "torch"
