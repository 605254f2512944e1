"""Clients as one batch of networks: what each would do alone, up to rounding, and the same bits on every engine."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor
from fedtailor.client import together
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.protocol import flocks
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.errors import FedtailorError
from fedtailor.messages import Refused, Task, Update
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedrolex import FedRolex
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.seeds import Seeds
from helpers import CLASSES, client, differing, federated, image_data, images, tiny_cnn, with_nan_inputs

COUNTS = (6, 9, 4, 11, 6, 3)  # with batches of 4 some step together, some alone, some rest
EVERYTHING = {
    "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "decayed": "matrices", "clip_norm": 0.05,
    "proximal": 0.1, "schedule_every": "step", "schedule": "exponential", "gamma": 0.5, "epochs": 2,
}  # fmt: skip
LOCALS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": EVERYTHING,
    "steps": {"steps": 5, "momentum": 0.5},
}


class ConvNet(nn.Module):
    """Images, with norms that keep no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 6, 3), nn.GroupNorm(1, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(self.norm(self.conv(x)).relu().mean((2, 3)))
        return answer


def conv_model(dtype: torch.dtype = torch.float32) -> ElasticModel:
    torch.manual_seed(0)
    pictures, labels = images(2).take(torch.arange(2))
    return fedtailor.elastic(ConvNet().to(dtype), (pictures.to(dtype), labels))


def in_double() -> FederatedData:
    columns = images(sum(COUNTS)).columns
    exact = fedtailor.data.Examples.of(columns[0].double(), columns[1])
    return federated(exact, COUNTS)


def tasks_of(method: Method, model: ElasticModel) -> list[Task]:
    state, seeds = method.init(model), Seeds(3)
    widths = (1, 0.5, 1, 1, 0.5, 1) if isinstance(method, HeteroFL) else (1,) * len(COUNTS)
    clients = [client(n, width, count) for n, (width, count) in enumerate(zip(widths, COUNTS, strict=True))]
    return [method.assign(state, each, model, seeds) for each in clients]


def answers(method: Method, model: ElasticModel, data: FederatedData) -> dict[int, Any]:
    found = InProcess(method, model, data).run(tasks_of(method, model))
    return {answer.client: answer for answer in found}


def close(one: Update, other: Update) -> None:
    assert one.weight == other.weight
    assert one.metrics["examples"] == other.metrics["examples"]
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-10)
    assert list(one.patch.values) == list(other.patch.values)
    for name, value in other.patch.values.items():
        torch.testing.assert_close(one.patch.values[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (FedAvg, {}),
        (HeteroFL, {"masked_loss": False, "label_rows": False}),
        (FedRolex, {"masked_loss": False, "label_rows": False}),
    ],
)
def test_each_client_does_what_it_would_do_alone(kind, own, local):
    model, data = conv_model(torch.float64), in_double()
    alone, many = (
        answers(kind(LocalTraining(batch_size=4, together=count, **local), **own), model, data)
        for count in (1, 4)
    )
    assert alone.keys() == many.keys() == set(range(len(COUNTS)))
    for number, expected in alone.items():
        close(many[number], expected)


def test_steps_are_taken_together(monkeypatch):
    """Six clients of one patch and batches of 4: their steps are few, and no client trains by itself."""
    sizes: list[int] = []
    original = together._Flock.take

    def counted(self: Any, step: int, rows: list[int], *rest: Any) -> None:
        sizes.append(len(rows))
        original(self, step, rows, *rest)

    monkeypatch.setattr(together._Flock, "take", counted)
    monkeypatch.setattr("fedtailor.client.training.train", None)
    answers(FedAvg(LocalTraining(batch_size=4, together=6)), conv_model(), image_data(COUNTS))
    assert sizes == [5, 1, 2, 2, 1, 1]  # of 6 9 4 11 6 | 3, then 2 . . . 2 | . 4 . 4, then . 1 | . . . 3
    assert sum(sizes) == sum(-(-count // 4) for count in COUNTS)


def test_who_leaves_the_numbers_is_refused_alone():
    data = with_nan_inputs(image_data(COUNTS), 1)
    model = conv_model()
    found = answers(FedAvg(LocalTraining(batch_size=4, together=6)), model, data)
    assert [isinstance(found[n], Refused) for n in range(6)] == [False, True, False, False, False, False]
    assert found[1].reason == "diverged"
    clean = answers(FedAvg(LocalTraining(batch_size=4, together=6)), model, image_data(COUNTS))
    for number in (0, 2, 3, 4, 5):
        assert not differing(found[number].patch.values, clean[number].patch.values)


class Grudging(FedAvg):
    """Cannot train several at once, and does not know it."""

    def train_together(self, *_: Any) -> Any:
        raise ValueError("not with those")


def test_where_anything_raises_each_is_trained_by_itself():
    model, data = conv_model(), image_data(COUNTS)
    alone = answers(FedAvg(LocalTraining(batch_size=4)), model, data)
    found = answers(Grudging(LocalTraining(batch_size=4, together=6)), model, data)
    assert all(not differing(found[n].patch.values, alone[n].patch.values) for n in alone)


def test_workers_give_the_bits_of_one_process_also_where_one_dies():
    model, data = conv_model(), image_data(COUNTS)
    method = FedAvg(LocalTraining(batch_size=4, momentum=0.9, together=4))
    expected = answers(method, model, data)
    with WorkerPool(method, model, data, 2) as pool:
        for killed in (False, True):
            found = {}
            for answer in pool.run(tasks_of(method, model)):
                if killed:
                    os.kill(pool.pids[0], signal.SIGKILL)
                    killed = False
                if answer is not None:
                    found[answer.client] = answer
            assert all(not differing(found[n].patch.values, expected[n].patch.values) for n in expected)


def test_who_is_with_whom_follows_from_the_tasks():
    model = conv_model()
    method = HeteroFL(LocalTraining(batch_size=4), masked_loss=False, label_rows=False)
    tasks = tasks_of(method, model)
    found = [[task.client.id for task in flock] for flock in flocks(tasks, 3)]
    assert found == [[0, 2, 3], [5], [1, 4]]
    assert [len(flock) for flock in flocks(tasks, 1)] == [1] * 6


def test_a_run_learns_as_without(tmp_path):
    settings = {"rounds": 3, "clients_per_round": 6, "engine": {"workers": 0}, "progress": False}
    runs = [
        fedtailor.train(
            conv_model().module, image_data(COUNTS), "equal", "fedavg",
            training={"batch_size": 4, "together": count}, **settings,
        )
        for count in (1, 6)
    ]  # fmt: skip
    one, other = (run.state.weights for run in runs)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "training", "message"),
    [
        ("fedavg", {"optimiser": "adamw", "lr": 0.001}, "1 with training.optimiser = 'adamw'"),
        ("fedavg", {"accumulate": 2}, "1 with training.accumulate = 2"),
        ("fedavg", {"precision": "bfloat16"}, "1 with training.precision = 'bfloat16'"),
        ("fjord", {}, "1 with fjord, whose clients train in ways of their own"),
        ("heterofl", {}, "1 with heterofl, .* masked_loss = false and label_rows = false"),
        ("fedavg", {"together": 0}, "training.together = 0: expected at least 1"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_before_a_run(method, training, message):
    with pytest.raises(FedtailorError, match=message):
        fedtailor.train(
            ConvNet(), image_data(COUNTS), "equal", method, rounds=1, training={"together": 4, **training}
        )


@pytest.mark.parametrize("module", [tiny_cnn(), nn.Sequential(ConvNet(), nn.Dropout(0.5))])
def test_networks_that_draw_or_keep_statistics_are_refused(module):
    with pytest.raises(FedtailorError, match=r"training.together = 4: \w+ cannot be trained for several"):
        fedtailor.train(module, image_data(COUNTS), "equal", "fedavg", rounds=1, training={"together": 4})
