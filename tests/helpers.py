"""Small networks, small data and exact comparisons that the tests of the round share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedtailor.data.batches import Examples
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.fleet import Fleet, fleet_by_name
from fedtailor.messages import Client, Lease, Refused, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.record import RoundRecord
from fedtailor.seeds import Seeds
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings, Setup
from fedtailor.storage.run_folder import WEIGHTS
from odd_networks import adapted, deep

CLASSES = 4
SIDE = 4  # pixels of the images

LOW_RANK = ("flexlora", "hetlora")  # methods that train adapters, and no other network
DEEP = ("depthfl", "nefl", "scalefl")  # methods that cut depth, and need blocks or exits

# The tensors of ``tiny_cnn`` by their place in the Sequential.
CONV1, NORM1, CONV2, NORM2, LINEAR = "0", "1", "4", "5", "8"


def slow_if(name: str, *slow: str) -> Any:
    """A parameter that only `make test-slow` runs if it is one of ``slow``: others show the same in less time."""
    return pytest.param(name, marks=pytest.mark.slow) if name in slow else name


def tiny_cnn(first: int = 4, second: int = 6, classes: int = CLASSES, seed: int = 0) -> nn.Module:
    """Two convolutions with batch norm, a flatten boundary (2 x 2 pixels) and a classifier."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(second * 4, classes),
        )


def tiny_mlp(hidden: int = 8, classes: int = CLASSES, inputs: int = 5, seed: int = 0) -> nn.Module:
    """No norm layer: everything about it can be written down by hand."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def tiny_adapted(seed: int = 0) -> nn.Module:
    """A frozen layer with a low-rank one beside it, behind a batch norm: its rank of 4 is all that shrinks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return adapted((1, SIDE, SIDE), CLASSES)


@cache
def adapted_model() -> ElasticModel:
    return elastic(tiny_adapted(), images(2).take(torch.arange(2)))


def tiny_deep(seed: int = 0) -> nn.Module:
    """Three residual blocks and three ends."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return deep((1, SIDE, SIDE), CLASSES)


@cache
def deep_model() -> ElasticModel:
    return elastic(tiny_deep(), images(2).take(torch.arange(2)))


def kind_of(method: str) -> str:
    """What kind of network a method is tested on."""
    return "adapted" if method in LOW_RANK else "deep" if method in DEEP else "plain"


def images(count: int, classes: int = CLASSES, seed: int = 1) -> Examples:
    """Noise with a bright corner per class; label i % classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    pixels = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    pixels[torch.arange(count), 0, labels // 2 % 2, labels % 2] += 3
    return Examples.of(pixels, labels)


def vectors(count: int, inputs: int = 5, classes: int = CLASSES, seed: int = 1) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples.of(torch.randn(count, inputs, generator=generator), torch.arange(count) % classes)


def federated(
    examples: Examples, sizes: Sequence[int], classes: int = CLASSES, test: Examples | None = None
) -> FederatedData:
    """Consecutive examples: ``sizes[i]`` of them for client i."""
    ends = torch.tensor(list(sizes)).cumsum(0).tolist()
    parts = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return FederatedData.from_examples(examples, test or examples, parts=parts, num_classes=classes)


def image_data(sizes: Sequence[int] = (6,) * 6, classes: int = CLASSES) -> FederatedData:
    return federated(images(sum(sizes), classes), sizes, classes, test=images(20, classes, seed=7))


def vector_data(sizes: Sequence[int] = (6,) * 6) -> FederatedData:
    return federated(vectors(sum(sizes)), sizes, test=vectors(20, seed=7))


def with_nan_inputs(data: FederatedData, client: int) -> FederatedData:
    """The same data, but every input of one client is NaN."""
    inputs, labels = data.train.columns
    inputs = inputs.clone()
    inputs[torch.from_numpy(data.partition[client].astype("int64"))] = torch.nan
    return replace(data, train=Examples.of(inputs, labels))


@cache
def _traced_once(build: Callable[..., nn.Module], *sizes: int) -> tuple[ElasticModel, dict[str, Tensor]]:
    classes = sizes[-1] if build is tiny_cnn else CLASSES
    examples = images(2, classes) if build is tiny_cnn else vectors(2)
    model = elastic(build(*sizes), examples.take(torch.arange(2)))
    return model, copy.deepcopy(model.module.state_dict())


def _fresh(build: Callable[..., nn.Module], *sizes: int) -> ElasticModel:
    """Traced once for all tests; whatever a test did to the module is undone before the next one gets it."""
    model, start = _traced_once(build, *sizes)
    model.module.load_state_dict(start)
    model.module.zero_grad(set_to_none=True)
    model.module.train()
    return model


def cnn_model(first: int = 4, second: int = 6, classes: int = CLASSES) -> ElasticModel:
    return _fresh(tiny_cnn, first, second, classes)


def mlp_model(hidden: int = 8) -> ElasticModel:
    return _fresh(tiny_mlp, hidden)


def group_of(model: ElasticModel, tensor: str, dim: int) -> str:
    """The channel group that drives one axis of a tensor."""
    (axis,) = model.groups.extents[tensor][dim].axes
    return axis.group


def client(number: int = 0, width: Any = 1, examples: int = 10, tier: str = "tier") -> Client:
    return Client(number, tier, Budget(width=width), examples)


def task_for(
    model: ElasticModel, cut: Cut | None = None, number: int = 0, examples: int = 10, seed: int = 0
) -> Task:
    """A training task on every tensor of the model at a cut."""
    patch = model.cut(model.weights(), cut or Cut.everything())
    return Task(
        client(number, examples=examples), 0, patch, Lease(frozenset(patch.values), patch.cut), Seeds(seed)
    )


def update_of(number: int, patch: Patch, weight: float = 1.0, round: int = 0) -> Update:
    return Update(number, round, round, patch, weight)


def bits(tensor: Tensor) -> bytes:
    """Type, shape and every bit, so that -0.0 differs from 0.0 and one NaN from another."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode() + raw.numpy().tobytes()


def snapshot(weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: bits(value) for name, value in weights.items()}


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> set[str]:
    """The names whose bits differ, or that only one side has."""
    ones, others = snapshot(first), snapshot(second)
    return {name for name in ones.keys() | others.keys() if ones.get(name) != others.get(name)}


def final_weights(folder: Path) -> dict[str, Tensor]:
    """The result that a finished run left in its folder."""
    return load_file(folder / WEIGHTS)


def held_mask(model: ElasticModel, cut: Cut, name: str) -> Tensor:
    """True where a cut holds a coordinate of a tensor, found by placing ones among zeros."""
    zeros = {key: torch.zeros_like(value) for key, value in model.weights().items()}
    ones = {key: torch.ones_like(value) for key, value in zeros.items()}
    return model.place(zeros, model.cut(ones, cut))[name] != 0


def setup_of(
    method: Method,
    model: ElasticModel,
    data: FederatedData,
    fleet: Fleet | str = "equal",
    settings: RoundSettings | None = None,
    seed: int = 0,
) -> Setup:
    """A setup from objects, unchecked."""
    devices = fleet_by_name(fleet) if isinstance(fleet, str) else fleet
    return Setup.of(method, model, data, devices, settings or RoundSettings(), Seeds(seed)).settled()


@dataclass(frozen=True)
class Result:
    state: ServerState
    records: list[RoundRecord]
    kept: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # what clients remember at the end


def timeless(records: Iterable[RoundRecord]) -> list[RoundRecord]:
    """Records without what differs from run to run."""
    return [replace(record, seconds=0) for record in records]


def run(
    method: Method,
    model: ElasticModel,
    data: FederatedData,
    fleet: Fleet | str = "equal",
    *,
    rounds: int = 1,
    cohort: int = 100,
    every: int = 100,
    seed: int = 0,
    engine: Callable[[InProcess], Any] | None = None,
    rules: EngineSettings | None = None,
) -> Result:
    """``run_rounds`` on a small scale; ``engine`` may wrap the in-process one."""
    records: list[RoundRecord] = []
    inner = InProcess(method, model, data)
    settings = RoundSettings(rounds, cohort, every, engine=rules or EngineSettings())
    setup = setup_of(method, model, data, fleet, settings, seed)
    engine_used = inner if engine is None else engine(inner)
    end = run_rounds(setup, engine_used, lambda record, _at: records.append(copy.deepcopy(record)))
    kept = {client: end.memory_of(client)[1] for client in sorted(end.memories)}
    return Result(end.state, records, kept)


@dataclass(frozen=True)
class Spoiling:
    """An engine on which one client's answers to one kind of task come back changed; None loses them."""

    inner: InProcess
    client: int
    spoil: Callable[[Update], Update | Refused | None]
    action: str = "train"

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused]:
        action = {task.client.id: task.action for task in tasks}
        for answer in self.inner.run(tasks):
            if answer.client == self.client and action[answer.client] == self.action:
                assert isinstance(answer, Update)
                changed = self.spoil(answer)
                if changed is not None:
                    yield changed
            else:
                yield answer
