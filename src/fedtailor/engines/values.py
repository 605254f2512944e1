"""Tasks and answers as plain values, which travel between processes in the wire format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.engines.protocol import Answer
from fedtailor.messages import Client, Lease, Measure, Refused, Task, Update
from fedtailor.seeds import Seeds
from fedtailor.storage.wire import MAX_INTEGER

Value = dict[str, Any]
Tensors = list[dict[str, Tensor]]


def evaluation_value(deployed: Sequence[Sequence[Patch]], batches: range, action: Measure) -> Value:
    """Which batches to evaluate, of which examples, and the patches' addresses, with how many answer together."""
    cuts = [patch.cut for patches in deployed for patch in patches]
    maps = {id(cut.mask.levels): cut for cut in cuts if cut.mask is not None}  # tiers share one, as a rule
    places = {each: place for place, each in enumerate(maps)}
    return {
        "action": action,
        "together": [len(patches) for patches in deployed],
        "cuts": [cut_value(cut) for cut in cuts],
        "levels": [levels_value(cut) for cut in maps.values()],
        "levels_of": [None if cut.mask is None else places[id(cut.mask.levels)] for cut in cuts],
        "batches": [batches.start, batches.stop],
    }


def evaluation_of(value: Mapping[str, Any], tensors: Tensors) -> tuple[list[list[Patch]], range]:
    """The inverse of ``evaluation_value``."""
    maps = [levels_of(levels) for levels in value["levels"]]
    cuts = [
        cut_from(cut, None if place is None else maps[place])
        for cut, place in zip(value["cuts"], value["levels_of"], strict=True)
    ]
    patches = iter([Patch(each, cut) for each, cut in zip(tensors, cuts, strict=True)])
    deployed = [list(itertools.islice(patches, count)) for count in value["together"]]
    return deployed, range(*value["batches"])


def task_value(task: Task) -> Value:
    """A task without the tensors of its patch."""
    client = task.client
    return {
        "client": [client.id, client.tier, client.num_examples, client.slot],
        "budget": {name: plain_number(limit) for name, limit in client.budget.limits.items()},
        "round": task.round,
        "cut": cut_value(task.patch.cut),
        "lease": [sorted(task.lease.names), cut_value(task.lease.cut), sorted(task.lease.partial)],
        "limits": [task.lease.most_metrics, task.lease.memory, task.lease.nonce],
        "seeds": str(task.seeds.root),
        "action": task.action,
        "memory": dict(task.memory),
        "memory_round": task.memory_round,
        "levels": levels_value(masked_cut(task)),
        "levels_are_new": task.levels is not None,
    }


def task_of(value: Mapping[str, Any], patch: Mapping[str, Any]) -> Task:
    """The task of a value and the tensors of its patch."""
    number, tier, num_examples, place = value["client"]
    names, cut, partial = value["lease"]
    levels = levels_of(value["levels"])
    held = cut_from(value["cut"], levels)
    leased = held if cut == value["cut"] else cut_from(cut, levels)
    return Task(
        client=Client(number, tier, Budget(**value["budget"]), num_examples, place),
        round=value["round"],
        patch=Patch(dict(patch), held),
        lease=Lease(frozenset(names), leased, frozenset(partial), *value["limits"]),
        seeds=Seeds(int(value["seeds"])),
        action=value["action"],
        memory=value["memory"],
        memory_round=value["memory_round"],
        levels=levels if value["levels_are_new"] else None,
    )


def answer_value(answer: Answer) -> Value:
    """An update, or why there is none."""
    if isinstance(answer, Refused):
        return {"refused": [answer.client, answer.round, answer.reason, answer.detail, answer.trace]}
    return {
        "update": [answer.client, answer.round, answer.base_round],
        "nonce": answer.nonce,
        "weight": plain_number(answer.weight),
        "metrics": {name: plain_number(metric) for name, metric in answer.metrics.items()},
        "memory": dict(answer.memory),
        "cut": cut_value(answer.patch.cut),
        "values": dict(answer.patch.values),
    }


def answer_of(value: Mapping[str, Any], levels: Levels | None = None) -> Answer:
    """The answer of a value, to a task with this map of levels; whether it may be merged is for the server to check."""
    if "refused" in value:
        return Refused(*value["refused"])
    client, round, base_round = value["update"]
    patch = Patch(value["values"], cut_from(value["cut"], levels))
    weight, metrics, memory = value["weight"], value["metrics"], value["memory"]
    return Update(client, round, base_round, patch, weight, metrics, memory, value["nonce"])


def masked_cut(task: Task) -> Cut:
    """The cut whose map of levels travels with a task: what it holds, or, of a whole model, what it must send back."""
    return task.patch.cut if task.patch.cut.mask is not None else task.lease.cut


def levels_value(cut: Cut) -> dict[str, Tensor] | None:
    """The map of a cut's mask."""
    return None if cut.mask is None else dict(cut.mask.levels.maps)


def levels_of(value: dict[str, Tensor] | None) -> Levels | None:
    """The inverse of ``levels_value``."""
    return None if value is None else Levels(value)


def plain_number(number: Any) -> Any:
    """Exact numbers as text, and NumPy's as Python's: the wire knows no others."""
    if isinstance(number, Fraction):
        return str(number)
    large = isinstance(number, int) and not -MAX_INTEGER <= number < MAX_INTEGER
    return float(number) if large or isinstance(number, float) else number
