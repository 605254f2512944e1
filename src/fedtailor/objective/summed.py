"""Metrics that are no means over examples: sums are kept batch by batch, and the value is worked out of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.batches import Batch, target_of
from fedtailor.data.sources import UNLABELLED
from fedtailor.objective.losses import matched

Sums = Mapping[str, float]
BEYOND = 700.0  # of which the exponential is still a number


@dataclass(frozen=True)
class Summed:
    """A metric of sums: perplexity is no mean of the batches' perplexities, and F1 none of theirs."""

    sums: Callable[[Any, Batch], dict[str, float]]  # of one batch
    value: Callable[[Sums], float]  # of all batches together; only ratios of sums may matter

    def __call__(self, output: Any, batch: Batch) -> float:
        """The value for one batch alone."""
        return self.value(self.sums(output, batch))


def part(metric: str, sum_: str) -> str:
    """Under what name a sum of a metric travels beside the other scores.

    >>> part("perplexity", "tokens")
    'perplexity: tokens'
    """
    return f"{metric}: {sum_}"


def worked_out(means: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Scores with metrics of sums in the place of their sums, behind the loss in the order of the metrics."""
    marks = {name: part(name, "") for name, metric in metrics.items() if isinstance(metric, Summed)}
    others = {name: mean for name, mean in means.items() if not name.startswith(tuple(marks.values()))}
    if not marks:
        return others
    for name, mark in marks.items():
        own = {key.removeprefix(mark): mean for key, mean in means.items() if key.startswith(mark)}
        others[name] = metrics[name].value(own)
    first = [name for name in others if name not in metrics]
    return {name: others[name] for name in [*first, *metrics]}


# Perplexity


def _surprise(output: Tensor, target: Tensor) -> dict[str, float]:
    labelled = int((target != UNLABELLED).sum())
    scores, classes = output.reshape(-1, output.shape[-1]).double(), target.reshape(-1)
    return {"surprise": float(F.cross_entropy(scores, classes, reduction="sum")), "tokens": float(labelled)}


def _perplexity(sums: Sums) -> float:
    """exp of the mean cross-entropy of labelled positions, over all of them alike."""
    mean = sums["surprise"] / sums["tokens"] if sums["tokens"] else math.nan
    return math.exp(min(mean, BEYOND))


def _of_positions(output: Tensor, batch: Batch) -> dict[str, float]:
    return _surprise(output, target_of(batch))


def _of_next(output: Tensor, batch: Batch) -> dict[str, float]:
    return _surprise(output[:, :-1], target_of(batch)[:, 1:])


perplexity, next_perplexity = Summed(_of_positions, _perplexity), Summed(_of_next, _perplexity)


# F1


def _counts(answered: Tensor, true: Tensor) -> dict[str, float]:
    """Of labels (examples, labels): how often each was rightly said, said, and true."""
    table = torch.stack([(answered & true).sum(0), answered.sum(0), true.sum(0)], dim=1)
    return {
        f"{label}/{what}": float(count)
        for label, counts in enumerate(table.tolist())
        for what, count in zip(("right", "said", "true"), counts, strict=True)
        if count
    }


def _of_classes(output: Tensor, batch: Batch) -> dict[str, float]:
    target = target_of(batch).reshape(-1)
    scores = output.reshape(-1, output.shape[-1])[target != UNLABELLED]
    target, classes = target[target != UNLABELLED], output.shape[-1]
    return _counts(F.one_hot(scores.argmax(dim=-1), classes).bool(), F.one_hot(target, classes).bool())


def _of_labels(output: Tensor, batch: Batch) -> dict[str, float]:
    answers, target = matched(output, batch)
    rows = answers.reshape(len(answers), -1)
    return _counts(rows > 0, target.reshape(rows.shape) > 0.5)


def _by_label(sums: Sums) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for key, count in sums.items():
        label, _, what = key.partition("/")
        found.setdefault(label, {"right": 0.0, "said": 0.0, "true": 0.0})[what] = count
    return found


def _f1(counts: Mapping[str, float]) -> float:
    """2 right / (said + true): the harmonic mean of precision and recall."""
    return 2 * counts["right"] / (counts["said"] + counts["true"])


def _macro(sums: Sums) -> float:
    """The mean over the classes that occur, in answers or in truth."""
    found = _by_label(sums)
    return math.fsum(map(_f1, found.values())) / len(found) if found else 0.0


def _micro(sums: Sums) -> float:
    """That of all labels counted together."""
    found = _by_label(sums).values()
    together = {what: math.fsum(each[what] for each in found) for what in ("right", "said", "true")}
    return _f1(together) if together["said"] + together["true"] else 0.0


macro_f1 = Summed(_of_classes, _macro)
label_macro_f1, label_micro_f1 = Summed(_of_labels, _macro), Summed(_of_labels, _micro)
