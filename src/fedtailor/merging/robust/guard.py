"""How long the steps of a round are, and whom to believe where there are too few to compare.

The length of a step is its root mean square over a coverage class, so that pieces of any size compare. What is far
longer than the median of the class is shortened to ``bound`` medians of it.

A class with one or two holders is *thin*: no median tells which of two is right. Steps there are bounded by what is
usual in the other classes, and a client is heard only if it goes the way of the others where these can check it: the
step that it sent for all its other coordinates has a positive product with the median step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.merging.robust.answers import Answers
from fedtailor.merging.robust.columns import median

LEAST_HOLDERS = 3  # of whom one may be bad


def class_sizes(answers: Answers) -> Tensor:
    """How many coordinates each class has, in all tensors that go on from where they were."""
    sizes = torch.zeros(answers.number_of_classes, dtype=torch.int64)
    for name in filter(answers.is_step, answers.names):
        for block in answers.blocks(name, values=False):
            sizes += torch.bincount(block.classes, minlength=len(sizes)).cpu()
    return sizes


def lengths(answers: Answers, sizes: Tensor) -> Tensor:
    """(clients, classes): the root mean square of each step; NaN of a class that a client does not hold."""
    squares = torch.zeros((len(answers.updates), answers.number_of_classes), dtype=torch.float64)
    holds = torch.zeros(squares.shape, dtype=torch.bool)
    for name in filter(answers.is_step, answers.names):
        for block in answers.blocks(name):
            found = block.steps.square()
            for each in block.classes.unique().tolist():
                chosen = block.classes == each
                whole = bool(chosen.all())
                squares[block.clients, each] += (found if whole else found[:, chosen]).sum(1).cpu()
                held = (block.held if whole else block.held[:, chosen]).any(1)
                holds[block.clients, each] |= held.cpu()
    return torch.where(holds, (squares / sizes.clamp(min=1)).sqrt(), math.nan)


def bounds(found: Tensor, holders: Sequence[int], times: float) -> list[float]:
    """How long a step may be in each class: so many medians of its own holders; of a thin class, of the other classes.

    Where all classes are thin, medians of all clients; a lone client has nobody to be compared with.
    """
    own = {
        each: statistics.median_low(_there(found[:, each]))
        for each, count in enumerate(holders)
        if count >= LEAST_HOLDERS and _there(found[:, each])
    }
    everyone = [max(_there(row)) for row in found if _there(row)]
    alone = statistics.median_low(everyone) if len(everyone) > 1 else math.inf
    elsewhere = statistics.median_low(own.values()) if own else alone
    return [times * own.get(each, elsewhere) for each in range(found.shape[1])]


def _there(column: Tensor) -> list[float]:
    return [value for value in column.tolist() if not math.isnan(value)]


def shrinking(found: Tensor, allowed: Sequence[float]) -> Tensor:
    """(clients, classes): the factor that each step is multiplied by; 1 where it is no longer than allowed."""
    limit = torch.tensor(allowed, dtype=torch.float64)
    return torch.where(found > limit, limit / found, 1.0)


def believed(answers: Answers, thin: Tensor) -> list[bool]:
    """Which clients go the way of the others, judged where at least three hold a coordinate.

    Whoever holds thin classes alone cannot be judged, and is believed.
    """
    products = torch.zeros(len(answers.updates), dtype=torch.float64)
    judged = torch.zeros(len(answers.updates), dtype=torch.bool)
    for name in filter(answers.is_step, answers.names):
        for block in answers.blocks(name):
            checked = ~thin.to(block.classes.device)[block.classes]
            if not bool(checked.any()):
                continue
            assert block.base is not None
            way = median(block.values, block.held).double() - block.base.double()
            products[block.clients] += (block.steps * torch.where(checked, way, 0.0)).sum(1).cpu()
            judged[block.clients] |= (block.held & checked).any(1).cpu()
    return [not seen or product > 0 for seen, product in zip(judged.tolist(), products.tolist(), strict=True)]
