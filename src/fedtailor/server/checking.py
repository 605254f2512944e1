"""Updates are checked against the lease before they reach arithmetic: a bad one is refused, the round goes on."""

from __future__ import annotations

import math

from fedtailor.elastic.cut import Cut
from fedtailor.elastic.model import ElasticModel
from fedtailor.round import Dropped, Task, Update


def check_update(task: Task, update: Update, model: ElasticModel) -> Dropped | None:
    """Why an update cannot be merged, or None. Cheapest checks first."""
    reason, detail = _fault(task, update, model)
    return Dropped(task.client.id, task.round, reason, detail) if reason else None


def _fault(task: Task, update: Update, model: ElasticModel) -> tuple[str, str]:
    if update.client != task.client.id or update.round != task.round:
        return "wrong-task", f"answers client {update.client}, round {update.round}"
    if not (isinstance(update.weight, int | float) and math.isfinite(update.weight) and update.weight > 0):
        return "bad-weight", f"weight {update.weight!r}"
    if task.action == "train" and update.weight > task.client.num_examples:
        return "bad-weight", f"weight {update.weight!r} for {task.client.num_examples} examples"
    if set(update.patch.values) != set(task.reply.names):
        odd = sorted(set(update.patch.values) ^ set(task.reply.names))
        return "wrong-names", f"missing or unasked: {', '.join(odd[:3])}"
    if not _allowed(task, update.patch.cut):
        return "out-of-lease", "coordinates that were not leased"
    return _fault_in_values(task, update, model)


def _allowed(task: Task, cut: Cut) -> bool:
    partial = task.reply.partial
    same = {group: units for group, units in cut.channels.items() if group not in partial}
    return same == dict(task.reply.cut.channels) and task.reply.cut.holds(cut)


def _fault_in_values(task: Task, update: Update, model: ElasticModel) -> tuple[str, str]:
    for name, value in update.patch.values.items():
        plain = name.partition("@")[0]
        shape = model.shape(plain, update.patch.cut)
        if tuple(value.shape) != shape:
            return "wrong-shape", f"{name}: {tuple(value.shape)} instead of {shape}"
        dtype = model.dtype(plain)
        if value.dtype != dtype:
            return "wrong-dtype", f"{name}: {value.dtype} instead of {dtype}"
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return "non-finite", name
    return "", ""
