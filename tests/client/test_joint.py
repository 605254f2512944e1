"""How far a coordinate moves in a step of several networks: by the mean of those that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Batch
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task
from fedtailor.method import Method
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, image_data, mlp_model, vectors

WIDTHS = (Fraction(1), Fraction(3, 5), Fraction(1, 5))
RATE = 0.1


@dataclass(frozen=True)
class Nested(Method):
    """Every step runs the same networks inside one another."""

    widths: ClassVar[tuple[Fraction, ...]] = WIDTHS

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        return [prefix(model.groups, width) for width in self.widths]


@dataclass(frozen=True)
class PerHolder(Nested):
    """The same; coordinates move by the mean of their holders."""

    @property
    def joint_mean(self) -> Any:
        return "holders"


class Recurrent(nn.Module):
    """Gates lie in blocks: a part of them is no prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 10, batch_first=True), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.lstm(x)
        answer: torch.Tensor = self.out(found[:, -1])
        return answer


def recurrent() -> tuple[ElasticModel, Batch]:
    torch.manual_seed(0)
    batch = (torch.randn(6, 5, 3), torch.randint(4, (6,)))
    return elastic(Recurrent(), batch), batch


def networks() -> dict[str, tuple[ElasticModel, Batch]]:
    return {
        "mlp": (mlp_model(10), vectors(6).take(torch.arange(6))),
        "cnn": (cnn_model(10, 15), image_data((6,)).client(0).take(torch.arange(6))),
        "lstm": recurrent(),
    }


def moved(method: Method, model: ElasticModel, batch: Batch) -> dict[str, torch.Tensor]:
    """How far one step moves every weight."""
    task = method.assign(method.init(model), client(0, 1), model, Seeds(0))
    steps = LocalSteps(method, task, model)
    steps.take(0, batch)
    after, before = steps.trained().values, task.patch.values
    return {name: after[name] - before[name] for name in model.trainable}


def alone(model: ElasticModel, batch: Batch, width: Fraction) -> dict[str, torch.Tensor]:
    """How far a step of one of the networks by itself moves the weights, in the full shape."""

    @dataclass(frozen=True)
    class Single(Nested):
        widths: ClassVar[tuple[Fraction, ...]] = (width,)

    return moved(Single(LocalTraining(lr=RATE)), model, batch)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "lstm"])
def test_every_coordinate_moves_by_the_mean_of_its_holders(kind):
    model, batch = networks()[kind]
    local = LocalTraining(lr=RATE)
    found, plain = (moved(each, model, batch) for each in (PerHolder(local), Nested(local)))
    steps = [alone(model, batch, width) for width in WIDTHS]
    held = [model.cut(model.weights(), prefix(model.groups, width)) for width in WIDTHS]
    blank = {name: torch.zeros_like(value) for name, value in model.weights().items()}
    ones = [
        model.place(blank, type(patch)({n: torch.ones_like(v) for n, v in patch.values.items()}, patch.cut))
        for patch in held
    ]
    counts = set[float]()
    for name in model.trainable:
        total, holders = sum(step[name] for step in steps), sum(each[name] for each in ones)
        counts |= set(holders.unique().tolist())
        torch.testing.assert_close(found[name], total / holders, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(plain[name], total / len(WIDTHS), rtol=1e-4, atol=1e-6)
    assert counts == {1.0, 2.0, 3.0}


def test_a_step_of_one_network_keeps_its_bits():
    model, batch = networks()["mlp"]

    @dataclass(frozen=True)
    class One(PerHolder):
        widths: ClassVar[tuple[Fraction, ...]] = (Fraction(3, 5),)

    found, plain = moved(One(LocalTraining(lr=RATE)), model, batch), alone(model, batch, Fraction(3, 5))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("widths", [WIDTHS[::-1], (Fraction(3, 5), Fraction(1), Fraction(1, 5))])
def test_networks_that_are_not_the_largest_first_are_refused(widths):
    model, batch = networks()["mlp"]

    upside = type("Upside", (PerHolder,), {"widths": widths})
    with pytest.raises(FedtailorError, match='step_cuts = .* the largest first, with joint_mean = "holders"'):
        moved(upside(LocalTraining(lr=RATE)), model, batch)
