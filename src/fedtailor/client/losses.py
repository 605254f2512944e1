"""Losses and metrics: what a user may replace, and what the methods add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.batches import Batch, target_of

Loss = Callable[[Any, Batch], Tensor]    # (the module's output, the batch) -> mean over the batch
Metric = Callable[[Any, Batch], float]


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of logits (N, C) or, for sequences, (N, T, C)."""
    target = target_of(batch)
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def accuracy(output: Tensor, batch: Batch) -> float:
    """The share of right answers."""
    right = output.argmax(dim=-1) == target_of(batch)
    return float(right.double().mean())


def mask_absent_labels(logits: Tensor, present: Tensor) -> Tensor:
    """Set the logits of labels that the client does not own to 0 (HeteroFL's masked cross-entropy).

    With the owned labels L of C classes the loss becomes -z_y + log(sum over L of exp(z_c) + (C - |L|)):
    zero, not minus infinity, so absent classes keep a constant share and get no gradient.
    """
    return torch.where(present, logits, torch.zeros((), dtype=logits.dtype, device=logits.device))


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is reported; both are the user's to replace."""

    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})
