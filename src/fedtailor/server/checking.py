"""Updates are checked against the lease before they reach arithmetic: a bad one is refused, the round goes on.

What is wrong is a short code, which the metrics count; ``docs/faults.md`` lists them all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import is_tagged, plain
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.answers import FINE, fault_of
from fedtailor.errors import FedtailorError
from fedtailor.messages import Refused, Task, Update
from fedtailor.record import LOSS
from fedtailor.server.outliers import Outliers

NOBODY = -1  # the client of an answer that names none
LARGEST_COUNT = 2**53  # up to here float64, in which updates are summed, knows every whole number


def check_answers(
    tasks: Iterable[Task],
    answers: Iterable[Update | Refused | None],
    model: ElasticModel,
    *,
    compare: bool = True,
) -> tuple[list[Update], list[Refused]]:
    """The updates that may be merged, at most one for each task, and what was refused or never came.

    Both in the order of the clients, so that nothing that is made of them depends on who answered first. Unless told
    otherwise, updates are also compared with each other.
    """
    asked = {task.client.id: task for task in tasks}
    outliers = Outliers(asked, model)
    accepted: dict[int, Update] = {}
    refused: list[Refused] = []
    round = next((task.round for task in asked.values()), -1)
    for answer in answers:
        if answer is None:
            continue
        if isinstance(answer, Refused):
            refused.append(answer)
        elif type(answer.client) is not int:
            refused.append(Refused(NOBODY, round, "malformed", "an answer of nobody"))
        elif answer.client not in asked:
            refused.append(Refused(answer.client, round, "wrong-client", "no task of this client is open"))
        elif answer.nonce != asked[answer.client].lease.nonce:
            refused.append(
                Refused(NOBODY, round, "wrong-client", f"not from client {answer.client}, who was asked")
            )
        elif answer.client in accepted:
            refused.append(Refused(answer.client, round, "duplicate", "has answered already"))
        elif (
            refusal := _refusal(asked[answer.client], answer, model, outliers if compare else None)
        ) is not None:
            refused.append(refusal)
        else:
            accepted[answer.client] = answer
    updates, absurd = [accepted[client] for client in sorted(accepted)], list[Refused]()
    if compare:
        updates, absurd = outliers.refuse(updates)
    return updates, sorted([*refused, *absurd], key=lambda each: (each.client, each.reason))


def check_update(task: Task, update: Update, model: ElasticModel) -> Refused | None:
    """Why an update cannot be merged, or None. Cheapest checks first."""
    return _refusal(task, update, model, None)


def _refusal(task: Task, update: Update, model: ElasticModel, outliers: Outliers | None) -> Refused | None:
    """Why an update cannot be merged, or None; measuring it for comparison looks at most of its numbers."""
    reason, detail = _fault(task, update, model)
    if not reason:
        measured = outliers.measure(update) if outliers is not None else ()
        reason, detail = _fault_in_numbers(update, measured)
    return Refused(task.client.id, task.round, reason, detail) if reason else None


def _fault(task: Task, update: Update, model: ElasticModel) -> tuple[str, str]:
    """What is wrong with anything but the numbers of what was trained."""
    if (fault := fault_of(task, update)) != FINE:
        return fault
    if update.client != task.client.id:
        return "wrong-client", f"answers for client {update.client}"
    if (update.round, update.base_round) != (task.round, task.round):
        return "wrong-round", f"answers round {update.round}, from weights of round {update.base_round}"
    if not 0 < update.weight <= task.client.num_examples:
        return "bad-weight", f"weight {update.weight!r} for {task.client.num_examples} examples"
    if set(update.patch.values) != set(task.lease.names):
        odd = sorted(set(update.patch.values) ^ set(task.lease.names))
        return "wrong-names", f"missing or unasked: {', '.join(odd[:3])}"
    if not _allowed(task, update.patch.cut, model):
        return "out-of-lease", "coordinates that were not leased"
    if task.action in ("evaluate", "validate"):
        missing = sorted({LOSS, *model.objective.metrics} - update.metrics.keys())
        if missing:
            return "bad-metrics", f"missing: {', '.join(missing)}"
    for name, value in update.patch.values.items():
        reason, detail = _fault_in_value(name, value, _shape(name, task, update, model), model)
        if reason:
            return reason, detail
    return "", ""


def _allowed(task: Task, cut: Cut, model: ElasticModel) -> bool:
    if cut == task.lease.cut:
        return True  # as nearly always
    try:
        real = Cut.of(model.groups, cut.channels).key == cut.key  # known groups, sorted units that exist
    except FedtailorError:
        return False
    partial = task.lease.partial
    leased = task.lease.cut
    same, whole = (
        {group: units for group, units in each.channels.items() if group not in partial}
        for each in (cut, leased)
    )
    same_parts = cut.sparse == leased.sparse and cut.absent == leased.absent
    return real and same == whole and same_parts and leased.holds(cut)


def _shape(name: str, task: Task, update: Update, model: ElasticModel) -> tuple[int, ...]:
    """The shape that the lease allows: a tensor of the cut that was sent, or of another (``x@tag``), is as it was."""
    if name in task.patch.values and (is_tagged(name) or update.patch.cut == task.patch.cut):
        return tuple(task.patch.values[name].shape)
    return model.shape(plain(name), update.patch.cut)


def _is_finite(value: Tensor) -> bool:
    """Whether all are numbers: then their sum nearly always is one, and it costs a tenth of asking each of them."""
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


def _fault_in_numbers(update: Update, finite: Collection[str]) -> tuple[str, str]:
    """Whether any value is no number; those that are known to be finite are left out."""
    for name, value in update.patch.values.items():
        if name not in finite and value.is_floating_point() and not _is_finite(value):
            return "non-finite", name
    return "", ""


def _fault_in_value(name: str, value: Tensor, shape: tuple[int, ...], model: ElasticModel) -> tuple[str, str]:
    own = plain(name)
    dtype = model.dtype(own)
    if tuple(value.shape) != shape:
        return "wrong-shape", f"{name}: {tuple(value.shape)} instead of {shape}"
    if value.dtype != dtype:
        return "wrong-dtype", f"{name}: {value.dtype} instead of {dtype}"
    if value.is_floating_point():
        if own not in model.statistics:
            return "", ""  # its numbers are looked at when nothing else is wrong
        if not _is_finite(value):
            return "non-finite", name
    elif value.numel() and not -LARGEST_COUNT <= int(value.min()) <= int(value.max()) <= LARGEST_COUNT:
        return "bad-statistics", f"{name}: no count that can be summed"
    if own in model.statistics and not own.endswith(".running_mean") and bool((value < 0).any()):
        return "bad-statistics", f"{name}: below zero"  # the root of a negative variance is NaN for everyone
    return "", ""
