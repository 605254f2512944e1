"""A step at width p is real: it computes, allocates and keeps what a network of width p does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.models import build_model
from fedtailor.seeds import Seeds
from helpers import client

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "step_cost.py"


class Shapes(TorchDispatchMode):
    """The shapes of all tensors with memory of their own that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.seen |= {tuple(tensor.shape) for tensor in tensors if not tensor._is_view()}
        return output


def peak_of(work: Callable[[], object]) -> int:
    """The largest number of bytes that PyTorch held at once, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


@pytest.fixture(scope="module")
def model() -> ElasticModel:
    torch.manual_seed(0)
    network = build_model(
        "resnet18", input_shape=(3, 8, 8), num_classes=10, stem=20, widths=[20, 40, 80, 160]
    )
    return elastic(network, batch(2))


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 8), torch.arange(size) % 10


def client_at(
    model: ElasticModel, held: str, width: str, local: LocalTraining | None = None
) -> Callable[[], LocalSteps]:
    """A client that was sent one width and whose steps all draw another."""
    widths = (width,) if held == width else (width, held)
    chances = (1.0, 1e-12)[: len(widths)]
    method = FjORD(local or LocalTraining(), widths=widths, probabilities=chances, distillation=False)
    task = method.assign(method.init(model), client(0, held), model, Seeds(0))
    return lambda: LocalSteps(method, task, model)


@pytest.mark.parametrize("width", ["1/5", "2/5", "3/5"])
def test_a_step_computes_what_a_plain_step_of_the_small_network_computes(model, width):
    data = batch(4)
    small = model.extract(model.weights(), prefix(model.groups, Fraction(width))).train()
    with FlopCounterMode(display=False) as plain:
        F.cross_entropy(small(data[0]), data[1]).backward()
    ours = client_at(model, "1", width)()
    with FlopCounterMode(display=False) as counted:
        ours.take(0, data)
    assert counted.get_total_flops() == plain.get_total_flops() > 0


def test_a_step_allocates_no_tensor_of_the_held_size(model):
    """Gradients of sliced views would: autograd pads them with zeros."""
    held = {tuple(value.shape) for value in model.weights().values() if value.dim() == 4}
    small = {model.shape(name, prefix(model.groups, Fraction(1, 5))) for name in model.trainable}
    steps = client_at(model, "1", "1/5")()
    steps.take(0, batch(4))
    with Shapes() as shapes:
        steps.take(0, batch(4))
    assert not (held - small) & shapes.seen
    assert len(small & shapes.seen) > 10


@pytest.mark.parametrize("local", [LocalTraining(), LocalTraining(momentum=0.9, weight_decay=0.1)])
def test_memory_follows_the_width_of_the_client(model, local):
    data = batch(4)
    clients = [client_at(model, width, width, local) for width in ("1/5", "2/5", "3/5", "4/5", "1")]
    peaks = [peak_of(lambda begin=begin: begin().take(0, data)) for begin in clients]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.2 * peaks[-1]  # activations follow p, weights and their gradients p squared
    assert peaks[2] < 0.6 * peaks[-1]


@pytest.mark.slow
def test_a_step_takes_the_time_of_a_plain_step():
    """The benchmark asks for 1.08; here a busy machine may take its share."""
    spec = importlib.util.spec_from_file_location("step_cost", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    found = benchmark.measure_time(benchmark.resnet(), ["1/5", "2/5", "3/5"], 16, 12)
    assert all(row["ratio"] < 1.2 for row in found)
