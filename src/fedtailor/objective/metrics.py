"""Metrics of a batch: means over its examples, so that the mean over batches is that over all examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedtailor.data.batches import Batch, target_of
from fedtailor.data.sources import UNLABELLED
from fedtailor.objective.losses import matched

Metric = Callable[[Any, Batch], float]


def accuracy(output: Tensor, batch: Batch) -> float:
    """The share of right answers; positions of sequences without a label do not count."""
    target = target_of(batch)
    right = output.argmax(dim=-1) == target
    return float(right[target != UNLABELLED].double().mean())


def top_5_accuracy(output: Tensor, batch: Batch) -> float:
    """The share of answers whose five likeliest classes hold the right one."""
    target = target_of(batch)
    likeliest = output.topk(min(5, output.shape[-1]), dim=-1).indices
    right = (likeliest == target.unsqueeze(-1)).any(dim=-1)
    return float(right[target != UNLABELLED].double().mean())


def next_accuracy(output: Tensor, batch: Batch) -> float:
    """``accuracy`` of the token that follows each position, where the target is the text itself."""
    return accuracy(output[:, :-1], (target_of(batch)[:, 1:],))


def top_5_next_accuracy(output: Tensor, batch: Batch) -> float:
    """``top_5_accuracy`` of the token that follows each position."""
    return top_5_accuracy(output[:, :-1], (target_of(batch)[:, 1:],))


def label_accuracy(output: Tensor, batch: Batch) -> float:
    """The share of labels that are told rightly to hold or not, each by itself."""
    answers, target = matched(output, batch)
    return float(((answers > 0) == (target > 0.5)).double().mean())


def exact_match(output: Tensor, batch: Batch) -> float:
    """The share of examples of which every label is told rightly."""
    answers, target = matched(output, batch)
    right = (answers > 0) == (target > 0.5)
    return float(right.reshape(len(right), -1).all(dim=1).double().mean())


def absolute_error(output: Tensor, batch: Batch) -> float:
    """Mean absolute error, in the units of the targets."""
    answers, target = matched(output, batch)
    return float((answers - target).abs().double().mean())
