"""The runs of the soak test (soak.py): a small network, sixteen clients, and what some do instead of their work.

python tools/soak_runs.py SPEC.json     # starts the run of a specification, or goes on with it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedtailor
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task, Update
from fedtailor.method import Method
from fedtailor.methods.registry import get_method

CLIENTS, COHORT, ROUNDS, CLASSES = 16, 6, 10, 4
DEADLINE = 8.0  # seconds: what a slow client costs a round
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "flado": {"sketch": 64},
    "heterofl": {},
    "feduniform": {},
    "fjord": {},
    "splitmix": {"base": 0.5},
    "uniprob": {},
    "flanc": {"widths": [0.5, 1]},
    "fedrolex": {},
    "federated-dropout": {"keep": 0.5},
    "ofa-fl": {"ratios": (1, "1/5"), "trigger": "schedule", "first": 0},
    "efd": {},
}
MEASURING = ("calibrate", "evaluate", "validate")


def network() -> nn.Module:
    """Two convolutions without norms, whose statistics clients would have to measure."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.Identity(), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1), nn.Identity(), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES),
        )  # fmt: skip


def examples(count: int, seed: int) -> Examples:
    """Noise with a bright corner for each class."""
    labels = torch.arange(count) % CLASSES
    pixels = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    pixels[torch.arange(count), 0, labels // 2, labels % 2] += 3
    return Examples.of(pixels, labels)


def data() -> FederatedData:
    """Twelve examples for each client."""
    parts = [list(range(12 * client, 12 * client + 12)) for client in range(CLIENTS)]
    return FederatedData.from_examples(
        examples(12 * CLIENTS, 1), examples(40, 7), parts=parts, num_classes=CLASSES
    )


def _values(update: Update, change: Any) -> Update:
    """The update with another first tensor."""
    name, value = next(iter(update.patch.values.items()))
    return replace(update, patch=replace(update.patch, values={**update.patch.values, name: change(value)}))


def _nan(value: Tensor) -> Tensor:
    return torch.full_like(value, torch.nan)


LIES: dict[str, Any] = {
    "nan": lambda update: _values(update, _nan),
    "shape": lambda update: _values(update, lambda value: value.flatten()[:1]),
    "type": lambda update: _values(update, lambda value: value.double()),
    "list": lambda update: _values(update, lambda value: value.tolist()),
    "names": lambda update: replace(
        update, patch=replace(update.patch, values={"x": torch.ones(2), **update.patch.values})
    ),
    "weight": lambda update: replace(update, weight=-1.0),
    "round": lambda update: replace(update, round=update.round + 1),
    "metrics": lambda update: replace(update, metrics={"loss": 10.0**300}),
    "memory": lambda update: replace(update, memory={"x": object()}),
    "nothing": lambda _update: None,
}
HABITS = ("raise", "slow", *LIES)


class Misbehaving:
    """Goes before a method: some of its clients raise, lie or never end, in the rounds that ``habits`` names."""

    habits: Mapping[str, str]  # "client:round" -> one of HABITS

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        habit = "" if task.action in MEASURING else self.habits.get(f"{task.client.id}:{task.round}", "")
        if habit == "raise":
            raise KeyError(f"client {task.client.id} in round {task.round}")
        if habit == "slow":
            time.sleep(10 * DEADLINE)
        update: Update = super().perform(task, data, model)  # type: ignore[misc]
        return LIES[habit](update) if habit in LIES else update


def _misbehaving(name: str) -> type[Method]:
    """The method of a name with such clients, where workers find it: in this module."""
    called = f"Misbehaving{name.title().replace('-', '')}"
    habits: Any = field(default_factory=dict)
    kind = make_dataclass(
        called, [("habits", Mapping[str, str], habits)], bases=(Misbehaving, get_method(name)), frozen=True
    )
    kind.__module__ = __name__
    return kind


METHODS = {name: _misbehaving(name) for name in SETTINGS}
globals().update({kind.__name__: kind for kind in METHODS.values()})


def go(folder: Path, method: str, habits: Mapping[str, str], seed: int, workers: int) -> None:
    """Train to the end, from where the folder is."""
    local = LocalTraining(batch_size=4, momentum=0.9)
    chosen = METHODS[method](**{"local": local, "habits": dict(habits), **SETTINGS[method]})
    deadline = DEADLINE if workers else 3600.0
    fedtailor.train(
        network(), data(), "uniform-2", chosen, rounds=ROUNDS, clients_per_round=COHORT, evaluate_every=3, seed=seed,
        engine={"workers": workers, "deadline": deadline, "strikes": 0, "quorum": 0.1}, folder=folder, resume=True,
        progress=False,
    )  # fmt: skip


def ended(spec: Mapping[str, Any]) -> int:
    """Do what a specification says; the exit code that ``fedtailor run`` would have."""
    try:
        go(Path(spec["folder"]), spec["method"], spec["habits"], spec["seed"], spec["workers"])
    except FedtailorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
