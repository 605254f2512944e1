"""Every method on every kind of task: it trains, or it is refused before the run starts, with the reason."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.methods.registry import get_method, method_names
from fedtailor.objective import TASKS, Objective
from fedtailor.record import RoundRecord
from fedtailor.run.setup import prepare
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import evaluate_tiers
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings
from helpers import kind_of, slow_if
from odd_networks import LowRank

COUNT, INPUTS, LENGTH, SYMBOLS = 36, 5, 4, 6
HEADS = ("4.weight", "4.up.weight")  # of either network, and of one with an adapted last layer

SETTINGS: dict[str, dict[str, Any]] = {
    "apfl": {"warmup": 1},
    "fedcs": {"warmup": 2},
    "federated-dropout": {"keep": 0.5},
    "flado": {"sketch": 64},
    "flanc": {"widths": [0.5, 1]},
    "nefl": {"level_widths": [0.5, 1], "level_depths": [0.5, 1]},
    "ofa-fl": {"ratios": (1, "1/20"), "trigger": "schedule", "first": 1},
    "splitmix": {"base": 0.5},
}
OWN = "own loss"
# Of outputs that nobody knows the meaning of, one network cannot teach another.
REFUSED = {(method, OWN) for method in ("apfl", "depthfl", "fedcs", "fjord", "scalefl")}


def own_loss(output: Tensor, batch: Any) -> Tensor:
    return (output.squeeze(-1) - batch[-1]).abs().mean()


class Residual(nn.Module):
    """x + f(x), with one linear layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu() / 4


def network(last: int, symbols: int = 0, kind: str = "plain") -> nn.Module:
    """Of vectors, or of every symbol of a text by itself."""
    with Seeds(0).scope("network"):
        first = nn.Embedding(symbols, 12) if symbols else nn.Linear(INPUTS, 12)
        if kind == "deep":
            blocks = nn.Sequential(*(Residual(12) for _ in range(6)))
            return nn.Sequential(first, blocks, nn.Identity(), nn.Identity(), nn.Linear(12, last))
        if kind == "adapted":
            return nn.Sequential(first, nn.Identity(), nn.Identity(), nn.ReLU(), LowRank(12, last, 4))
        return nn.Sequential(first, nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, last))


@cache
def problem(task: str, kind: str = "plain") -> tuple[ElasticModel, FederatedData]:
    """A network and data of which all that can be learnt is learnt in a few steps."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(COUNT, INPUTS, generator=generator)
    hidden = vectors @ torch.randn(INPUTS, 3, generator=generator)
    texts = torch.randint(SYMBOLS, (COUNT, LENGTH), generator=generator)
    ramps = (texts[:, :1] + torch.arange(LENGTH)) % SYMBOLS
    labels = (texts % 3).masked_fill(torch.arange(LENGTH) >= 1 + torch.arange(COUNT)[:, None] % LENGTH, -100)
    inputs, targets, module = {
        "classification": (vectors, hidden.argmax(dim=1), network(3, kind=kind)),
        "multi-label": (
            vectors,
            (hidden > 0).long(),
            network(3, kind=kind),
        ),  # whole numbers, but no classes
        "regression": (vectors, hidden, network(3, kind=kind)),
        "next-token": (texts, (texts + 1) % SYMBOLS, network(SYMBOLS, SYMBOLS, kind=kind)),
        "causal": (ramps, ramps, network(SYMBOLS, SYMBOLS, kind=kind)),
        "token classification": (texts, labels, network(3, SYMBOLS, kind=kind)),
        OWN: (vectors, hidden[:, 0], network(1, kind=kind)),
    }[task]
    examples = Examples.of(inputs, targets)
    data = FederatedData.from_examples(examples, examples, clients=3)
    objective = Objective(own_loss, {}) if task == OWN else Objective.of(task)
    told = {"adapted": {"keep": ["0"]}, "deep": {"exits": ["1.0", "1.2"]}}.get(kind, {})
    return elastic(module, data.example(), objective=objective, **told), data


def outcome(name: str, task: str) -> str:
    """``trains``, or why the run does not start."""
    model, data = problem(task, kind_of(name))
    method = get_method(name)(
        **{
            "local": LocalTraining(lr=0.3, momentum=0.5, clip_norm=1.0, batch_size=4, rounds=3),
            **SETTINGS.get(name, {}),
        }
    )
    settings = RoundSettings(rounds=3, clients_per_round=3, evaluate_every=3)
    try:
        setup = prepare(method, model, data, fleet_by_name("uniform-2"), settings, Seeds(0))
    except FedtailorError as error:
        return str(error)
    before = evaluate_tiers(setup, setup.start.state, setup.fleet.tiers).tiers
    records: list[RoundRecord] = []
    end = run_rounds(
        setup, InProcess(setup.method, model, setup.data), lambda record, _: records.append(record)
    )
    assert [record.cohort.refused for record in records] == [{}] * len(records)
    after = records[-1].tiers
    assert after is not None
    was, now = (fmean(each["loss"] for each in tiers.values()) for tiers in (before, after))
    assert now < was, (name, task, was, now)
    rows = [value for tensor, value in end.state.weights.items() if tensor.startswith(HEADS)]
    starts = [setup.start.state.weights[tensor] for tensor in end.state.weights if tensor.startswith(HEADS)]
    still = [
        int((row == start).reshape(len(row), -1).all(dim=1).sum())
        for row, start in zip(rows, starts, strict=True)
    ]
    assert sum(still) == 0, "outputs that never learn"
    return "trains"


# The slow ones differ from the others in nothing that a method sees; plain classification is what all other tests do.
COLUMNS = [slow_if(task, "causal", "classification", "next-token") for task in (*TASKS, OWN)]


@pytest.mark.parametrize("task", COLUMNS)
def test_every_method_trains_or_is_refused_with_the_reason(task):
    found = {name: outcome(name, task) for name in method_names()}
    refused = {name: reason for name, reason in found.items() if reason != "trains"}
    assert refused.keys() == {name for name, where in REFUSED if where == task}, refused
    for reason in refused.values():
        assert "nothing says what the outputs mean: set objective.task to classification" in reason
    counted = Counter("trains" if reason == "trains" else "refused" for reason in found.values())
    assert counted == ({"trains": 17, "refused": 5} if task == OWN else {"trains": 22})


def test_the_table_is_whole():
    """Twenty-two methods, six tasks, and a loss of one's own of which nothing is known: 149 train, 5 are refused."""
    assert (len(method_names()), len(TASKS), len(COLUMNS), len(REFUSED)) == (22, 6, 7, 5)
