"""Losses and metrics: what a user may replace, and what the methods add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.batches import Batch, target_of

Loss = Callable[[Any, Batch], Tensor]  # (the module's output, the batch) -> mean over the batch
Metric = Callable[[Any, Batch], float]


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of logits (N, C) or, for sequences, (N, T, C)."""
    target = target_of(batch)
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def accuracy(output: Tensor, batch: Batch) -> float:
    """The share of right answers."""
    right = output.argmax(dim=-1) == target_of(batch)
    return float(right.double().mean())


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean cross-entropy of the student against the teacher's softened answers; classes lie on the last axis.

    Its gradient is that of KL(teacher || student), and none reaches the teacher. The factor T^2 keeps the gradient's
    size where the temperature T flattens both answers.
    """
    target = (teacher.detach() / temperature).softmax(dim=-1)
    answers, targets = (logits.reshape(-1, logits.shape[-1]) for logits in (student / temperature, target))
    return F.cross_entropy(answers, targets) * temperature**2


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is reported; both are the user's to replace."""

    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})
