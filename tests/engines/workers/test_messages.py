"""Tasks and answers survive the journey to a worker and back, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.engines.protocol import Answer
from fedtailor.engines.values import (
    answer_of,
    answer_value,
    evaluation_of,
    evaluation_value,
    task_of,
    task_value,
)
from fedtailor.engines.workers.jobs import answers_of, answers_value, tasks_of, tasks_value
from fedtailor.messages import Client, Lease, Refused, Task, Update
from fedtailor.seeds import Seeds
from fedtailor.storage.wire import decode, encode
from helpers import bits

CUT = Cut({"a": range(3), "b": (1, 4, 7)}, "1/2", depth=Fraction(1, 3))
VALUES = {"z.weight": torch.tensor([-0.0, math.inf, math.nan, 1e-45]), "a.count": torch.tensor(7)}


def through(value):
    return decode(b"".join(bytes(piece) for piece in encode(value)))


def fields(kind) -> set[str]:
    return {item.name for item in dataclasses.fields(kind)}


def test_every_field_of_a_message_travels():
    """Whoever adds a field to a message adds it to ``messages.py``, and then here."""
    assert fields(Client) == {"id", "tier", "budget", "num_examples", "slot"}
    assert fields(Lease) == {"names", "cut", "partial", "most_metrics", "memory", "nonce"}
    assert fields(Task) == {
        "client", "round", "patch", "lease", "seeds", "action", "memory", "memory_round", "levels",
        "prepared",  # never travels: it is worked out where it is used
    }  # fmt: skip
    assert fields(Update) == {
        "client",
        "round",
        "base_round",
        "patch",
        "weight",
        "metrics",
        "memory",
        "nonce",
    }
    assert fields(Refused) == {"client", "round", "reason", "detail", "trace"}
    assert fields(Cut) == {"channels", "tag", "mask", "width", "absent", "depth"}


@pytest.mark.parametrize(
    "budget",
    [
        Budget(),
        Budget(width="1/3"),
        Budget(width=1),
        Budget(macs=0.5, params=100_000),
        Budget(bytes=12_345_678_901),
        Budget(width=0.7, macs=Fraction(1, 7), params=1),
        Budget(width=0.5, depth="1/3"),
    ],
)
def test_tasks(budget):
    client = Client(12, "tier|1", budget, 345, 6)
    lease = Lease(frozenset({"z.weight", "x@1/2"}), CUT, frozenset({"labels"}), 7, 4096, "mark")
    memory = {"mask": torch.tensor([True, False]), "times": 3, "list": [1, (2.5, None)]}
    task = Task(client, 9, Patch(VALUES, CUT), lease, Seeds(2**70), "calibrate", memory, 7)
    there = task_of(through(task_value(task)), through(dict(task.patch.values)))
    assert (there.client, there.lease, there.seeds) == (task.client, task.lease, task.seeds)
    assert repr(there.client.budget) == repr(budget)
    assert (there.round, there.action, there.memory_round) == (9, "calibrate", 7)
    assert there.patch.cut == CUT
    assert (there.patch.cut.tag, there.lease.cut.tag, there.patch.cut.depth) == ("1/2", "1/2", CUT.depth)
    assert list(there.patch.values) == list(VALUES)  # the order decides in which gradients are summed
    assert all(bits(there.patch.values[name]) == bits(value) for name, value in VALUES.items())
    assert bits(there.memory.pop("mask")) == bits(memory.pop("mask"))
    assert there.memory == memory


def test_evaluations():
    half, whole = Patch(VALUES, CUT), Patch({}, Cut.everything())
    deployed = [[half, whole], [whole]]
    tensors = through([dict(patch.values) for patches in deployed for patch in patches])
    there, batches = evaluation_of(through(evaluation_value(deployed, range(3, 9), "validate")), tensors)
    assert batches == range(3, 9)
    cuts = [[(patch.cut, patch.cut.tag) for patch in patches] for patches in there]
    assert cuts == [[(CUT, "1/2"), (Cut.everything(), "1")], [(Cut.everything(), "1")]]
    assert all(bits(there[0][0].values[name]) == bits(value) for name, value in VALUES.items())


def test_updates():
    update = Update(
        3, 4, 4, Patch(VALUES, CUT), 17, {"loss": 0.1 + 0.2, "nan": math.nan}, {"m": VALUES["a.count"]}
    )
    there = answer_of(through(answer_value(update)))
    assert isinstance(there, Update)
    assert (there.client, there.round, there.base_round, there.weight) == (3, 4, 4, 17)
    assert type(there.weight) is int
    assert there.metrics["loss"] == 0.1 + 0.2
    assert math.isnan(there.metrics["nan"])
    assert (there.patch.cut, there.patch.cut.tag) == (CUT, "1/2")
    assert all(bits(there.patch.values[name]) == bits(value) for name, value in VALUES.items())
    assert bits(there.memory["m"]) == bits(VALUES["a.count"])


def test_numbers_of_numpy_become_pythons_own():
    update = Update(0, 0, 0, Patch({}, CUT), np.float64(2.5), {"loss": np.float64(0.25)})
    there = answer_of(through(answer_value(update)))
    assert (there.weight, there.metrics) == (2.5, {"loss": 0.25})


@pytest.mark.parametrize("weight", [True, "10", None, -89, math.nan])
def test_bad_weights_travel_too_so_that_the_server_can_refuse_them(weight):
    there = answer_of(through(answer_value(Update(0, 0, 0, Patch({}, CUT), weight))))
    assert repr(there.weight) == repr(weight)


def test_refused_clients():
    refused = Refused(5, 6, "diverged", "the loss became nan")
    assert answer_of(through(answer_value(refused))) == refused


def tasks_alike(count: int = 3) -> list[Task]:
    patch = Patch(dict(VALUES), CUT)
    lease = Lease(frozenset(VALUES), CUT, frozenset({"b"}), 7, 99)
    return [
        Task(
            Client(number, "small", Budget(width=Fraction(1, 3)), 10 + number, number),
            4, patch, dataclasses.replace(lease, nonce=f"n{number}"), Seeds(5), memory_round=number - 1,
        )
        for number in range(count)
    ]  # fmt: skip


def test_tasks_of_one_piece_travel_as_one_and_their_differences():
    tasks = tasks_alike()
    value = through(tasks_value(tasks))
    assert value.keys() == {"first", "own"}
    assert tasks_of(value, VALUES) == [dataclasses.replace(task, patch=Patch(VALUES, CUT)) for task in tasks]


@pytest.mark.parametrize(
    "change",
    [
        {"memory": {"seen": torch.ones(2)}},
        {"round": 5},
        {"action": "calibrate"},
        {"seeds": Seeds(6)},
        {"client": Client(1, "large", Budget(width=1), 11, 1)},
        {"lease": Lease(frozenset(VALUES), CUT, most_metrics=8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tasks_that_differ_otherwise_travel_whole(change):
    first, second, third = tasks_alike()
    tasks = [first, dataclasses.replace(second, **change), third]
    value = through(tasks_value(tasks))
    assert value.keys() == {"tasks"}
    found = tasks_of(value, VALUES)
    assert [dataclasses.replace(task, memory={}) for task in found] == [
        dataclasses.replace(task, memory={}, patch=Patch(VALUES, CUT)) for task in tasks
    ]
    assert [task.memory.keys() for task in found] == [task.memory.keys() for task in tasks]


def updates_alike(tasks: list[Task]) -> list[Update]:
    return [
        Update(
            task.client.id, 4, 4, Patch({n: value + task.client.id for n, value in VALUES.items()}, CUT),
            Fraction(task.client.id + 1, 3), {"loss": 0.5 + task.client.id, "examples": 3}, {}, task.lease.nonce,
        )
        for task in tasks
    ]  # fmt: skip


def test_updates_of_one_piece_travel_as_few_tensors():
    tasks = tasks_alike()
    updates = updates_alike(tasks)
    value = through(answers_value(updates))
    assert [(tuple(table.shape), table.dtype) for table in value["tables"]] == [
        ((3, 4), torch.float32),
        ((3, 1), torch.int64),
    ]
    for one, other in zip(answers_of(value, tasks), updates, strict=True):
        assert isinstance(one, Update)
        assert one.patch.cut is tasks[0].lease.cut
        assert {n: bits(v) for n, v in one.patch.values.items()} == {
            n: bits(v) for n, v in other.patch.values.items()
        }
        assert (one.client, one.round, one.base_round, one.nonce) == (other.client, 4, 4, other.nonce)
        assert (one.weight, one.metrics) == (str(other.weight), other.metrics)


def test_updates_of_one_type_of_numbers_come_as_rows_of_one_table():
    tasks = tasks_alike()
    floats = {"b": torch.arange(6.0).view(2, 3), "none": torch.zeros(0, 2), "a": torch.tensor(0.5)}
    updates = [
        dataclasses.replace(each, patch=Patch({n: v + each.client for n, v in floats.items()}, CUT))
        for each in updates_alike(tasks)
    ]
    for one, other in zip(answers_of(through(answers_value(updates)), tasks), updates, strict=True):
        assert isinstance(one, Update)
        assert one.patch.row is not None
        assert one.patch.row.tolist() == [*(value + other.client for value in range(6)), 0.5 + other.client]
        assert [one.patch.row[start:stop].tolist() for start, stop in one.patch.runs] == [
            value.flatten().tolist() for value in other.patch.values.values()
        ]
        assert [value.shape for value in one.patch.values.values()] == [
            value.shape for value in other.patch.values.values()
        ]
        assert (
            dataclasses.replace(one.patch, cut=CUT).row is None
        )  # a patch with other values has no such row


@pytest.mark.parametrize("odd", ["refused", "memory", "metrics", "shape"])
def test_answers_that_differ_travel_by_themselves(odd):
    tasks = tasks_alike()
    answers: list[Answer] = list(updates_alike(tasks))
    second = answers[1]
    assert isinstance(second, Update)
    answers[1] = {
        "refused": Refused(1, 4, "diverged", "the loss"),
        "memory": dataclasses.replace(second, memory={"seen": torch.ones(2)}),
        "metrics": dataclasses.replace(second, metrics={"loss": 1.0}),
        "shape": dataclasses.replace(second, patch=Patch({**VALUES, "a.count": torch.ones(2)}, CUT)),
    }[odd]
    value = through(answers_value(answers))
    assert value.keys() == {"answers"}
    assert [type(each) for each in answers_of(value, tasks)] == [type(each) for each in answers]
