"""Whether what a client hands over is an answer at all: types, names and sizes, before anything is computed with it.

Asked where the client's data is, because what is no answer cannot travel either, and again by the server, which trusts
nobody. What is wrong is a short code and a few words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.cutting.levels import Mask
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.errors import FedtailorError, one_line
from fedtailor.messages import Task, Update
from fedtailor.storage.checkpoint import MEMORY_DEPTH
from fedtailor.storage.wire import MAX_INTEGER, can_travel, structure_of

MALFORMED, BAD_METRICS, BAD_MEMORY, NON_FINITE = "malformed", "bad-metrics", "bad-memory", "non-finite"

LARGEST_METRIC = 1e100  # in size: sums and squares of many of them are still numbers
LARGEST_WEIGHT = 2.0**53  # up to here float64, in which updates are summed, knows every whole number
LONGEST_NAME = 100  # characters of a metric's name
MOST_PASSES = 1_000_000  # over its examples, that a client may claim to have made

Fault = tuple[str, str]  # a code and a few words; the code is empty where nothing is wrong
FINE: Fault = ("", "")


def fault_of(task: Task, answer: object) -> Fault:
    """What is wrong with the form of an answer to a task."""
    if not isinstance(answer, Update):
        return MALFORMED, f"{type(answer).__name__} instead of an answer"
    for name in ("client", "round", "base_round"):
        value = getattr(answer, name)
        if type(value) is not int or not -MAX_INTEGER <= value < MAX_INTEGER:
            return MALFORMED, f"{name} is {type(value).__name__}, or far too large"
    if not _is_number(answer.weight) or not -LARGEST_WEIGHT <= answer.weight <= LARGEST_WEIGHT:
        return "bad-weight", "no weight"
    return (
        _fault_in_patch(task, answer.patch)
        or _fault_in_metrics(task, answer.metrics)
        or _fault_in_memory(task, answer)
        or FINE
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fault_in_patch(task: Task, patch: object) -> Fault | None:
    if not isinstance(patch, Patch) or not isinstance(patch.cut, Cut) or not isinstance(patch.values, dict):
        return MALFORMED, "no patch"
    for name, value in patch.values.items():
        if not isinstance(name, str):
            return MALFORMED, f"a tensor called {one_line(repr(name), 50)}"
        if not isinstance(value, Tensor) or value.is_nested:
            return MALFORMED, f"{one_line(name, 50)} is {type(value).__name__} instead of a dense tensor"
    fault = None if patch.cut is task.lease.cut else _fault_in_cut(patch.cut)
    if fault is not None:
        return fault
    if type(patch.values) is dict and all(
        type(name) is str and can_travel(value) for name, value in patch.values.items()
    ):
        return None  # as nearly always; what is wrong is said by whoever would write it down
    try:
        structure_of(patch.values, "patch", [], 0)
    except FedtailorError as error:
        return MALFORMED, one_line(str(error), 200)
    return None


def _fault_in_cut(cut: Cut) -> Fault | None:
    if not isinstance(cut.channels, Mapping) or not isinstance(cut.mask, Mask | None):
        return MALFORMED, "no cut"
    for group, units in cut.channels.items():
        whole = isinstance(units, range) or (isinstance(units, np.ndarray) and units.dtype.kind in "iu")
        if not isinstance(group, str) or not (whole or _are_whole(units)):
            return MALFORMED, "no cut"
    try:
        cut_from(cut_value(cut), None if cut.mask is None else cut.mask.levels)
    except FedtailorError as error:  # units out of order, or none
        return "out-of-lease", one_line(str(error), 200)
    return None


def _are_whole(units: object) -> bool:
    return isinstance(units, list | tuple) and all(type(unit) is int for unit in units)


def _fault_in_metrics(task: Task, metrics: object) -> Fault | None:
    if not isinstance(metrics, dict) or len(metrics) > task.lease.most_metrics:
        return BAD_METRICS, f"expected a table of at most {task.lease.most_metrics} metrics"
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            return BAD_METRICS, f"a metric called {one_line(repr(name), 50)}"
        if not _is_number(value):
            return BAD_METRICS, f"metric {name} is {type(value).__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return NON_FINITE, f"metric {name}"
        if not -LARGEST_METRIC <= value <= LARGEST_METRIC:
            return BAD_METRICS, f"metric {name} is beyond {LARGEST_METRIC:g}"
    examples = metrics.get("examples", 0)
    if not 0 <= examples <= MOST_PASSES * max(1, task.client.num_examples):
        return BAD_METRICS, f"{examples:g} examples, and the client has {task.client.num_examples}"
    return None


def _fault_in_memory(task: Task, answer: Update) -> Fault | None:
    """A memory must be plain and small, because the server keeps it; what the client was handed it may hand back."""
    if answer.memory is task.memory or _same(answer.memory, task.memory):
        return None
    tensors: list[Tensor] = []
    try:
        if not isinstance(answer.memory, dict):
            raise FedtailorError(f"memory is of type {type(answer.memory).__name__}: expected dict")
        size = _length(structure_of(answer.memory, "memory", tensors, MEMORY_DEPTH))
    except FedtailorError as error:
        return BAD_MEMORY, one_line(str(error), 200)
    size += sum(tensor.nbytes for tensor in tensors)
    most = task.lease.most_memory(task.patch)
    return (BAD_MEMORY, f"{size:,} bytes, and {most:,} may be kept") if size > most else None


def _same(one: object, other: Mapping[str, Any]) -> bool:
    if not isinstance(one, dict) or one.keys() != other.keys():
        return False
    return all(
        isinstance(value, Tensor) and isinstance(other[name], Tensor) and _equal(value, other[name])
        for name, value in one.items()
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    kinds = [(each.dtype, each.layout, each.device) for each in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(one, other)


def _length(structure: Any) -> int:
    """About how many bytes plain values take."""
    if isinstance(structure, str):
        return len(structure)
    if isinstance(structure, Mapping):
        return 8 + sum(_length(key) + _length(value) for key, value in structure.items())
    return 8 + sum(map(_length, structure)) if isinstance(structure, list) else 8
