"""Costs against hand formulas and published counts; curves against counts; the estimate of training memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elasticity.plain_networks import NETWORKS, from_scratch, network
from fedtailor.elasticity.costing.cost import Cost, examples_in, products
from fedtailor.elasticity.costing.curves import total
from fedtailor.elasticity.costing.memory import Workload, saved_parts
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.objective import Objective
from helpers import cnn_model, mlp_model, slow_if

ROOT = Path(__file__).parents[3]
FIFTHS = [Fraction(number, 5) for number in range(1, 6)]


def macs(module: nn.Module, *inputs: Tensor) -> int:
    parts = products(module.to("meta").eval(), dict(module.named_parameters()), inputs, {})
    return total(parts) // examples_in(inputs, {})


def images(channels: int = 3) -> Tensor:
    return torch.zeros(2, channels, 8, 8)


def words(features: int = 6) -> Tensor:
    return torch.zeros(2, 7, features)  # batch, time, features


class Transposed(nn.Module):
    """A linear layer on an axis that is not the last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2))


class OwnBias(nn.Module):
    """A matrix and a bias used by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 5))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.weight + self.bias)


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (nn.Conv2d(3, 5, 3), (images(),), 5 * 6 * 6 * (3 * 9 + 1)),
        (nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False), (images(),), 5 * 4 * 4 * 3 * 9),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), (images(4),), 4 * 8 * 8 * (9 + 1)),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (images(4),), 6 * 8 * 8 * (2 * 9 + 1)),
        (nn.Conv1d(6, 5, 3), (words().transpose(1, 2),), 5 * 5 * (6 * 3 + 1)),
        (nn.ConvTranspose2d(3, 5, 2, stride=2), (images(),), 3 * 8 * 8 * 5 * 4 + 5 * 16 * 16),
        (nn.Linear(6, 5), (torch.zeros(2, 6),), 5 * (6 + 1)),
        (nn.Linear(6, 5), (words(),), 7 * 5 * (6 + 1)),
        (nn.Linear(6, 5, bias=False), (words(),), 7 * 5 * 6),
        (Transposed(), (words(),), 6 * 5 * (7 + 1)),
        (OwnBias(), (words(),), 7 * 5 * (6 + 1)),
        (nn.Bilinear(3, 4, 5), (torch.zeros(2, 3), torch.zeros(2, 4)), 5 * (3 * 4 + 1)),
        (nn.LSTM(6, 5, batch_first=True), (words(),), 7 * 4 * 5 * (6 + 5 + 2)),
        (nn.LSTM(6, 5, batch_first=True, bias=False), (words(),), 7 * 4 * 5 * (6 + 5)),
        (nn.LSTM(6, 5, 2, batch_first=True), (words(),), 7 * 4 * 5 * (6 + 5 + 2) + 7 * 4 * 5 * (5 + 5 + 2)),
        (nn.LSTM(6, 5, batch_first=True, bidirectional=True), (words(),), 2 * 7 * 4 * 5 * (6 + 5 + 2)),
        (nn.GRU(6, 5, batch_first=True), (words(),), 7 * 3 * 5 * (6 + 5 + 2)),
        (nn.RNN(6, 5, batch_first=True), (words(),), 7 * 5 * (6 + 5 + 2)),
        (nn.LSTMCell(6, 5), (torch.zeros(2, 6),), 4 * 5 * (6 + 5 + 2)),
        (nn.MultiheadAttention(6, 2, batch_first=True), (words(),) * 3, 4 * 7 * 6 * (6 + 1) + 2 * 7 * 7 * 6),
        (
            nn.TransformerEncoderLayer(6, 2, dim_feedforward=10, batch_first=True),
            (words(),),
            4 * 7 * 6 * (6 + 1) + 2 * 7 * 7 * 6 + 7 * 10 * (6 + 1) + 7 * 6 * (10 + 1),
        ),
        (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU6(), nn.MaxPool2d(2)), (images(),), 0),
    ],
)
def test_macs_by_hand(module: nn.Module, inputs: tuple[Tensor, ...], expected: int) -> None:
    assert macs(module, *inputs) == expected


def test_attention_of_the_transformer_by_hand() -> None:
    model = network("transformer")
    time, features, hidden, classes = 80, 128, 256, 86
    block = 4 * time * features * (features + 1) + 2 * time * time * features
    block += time * hidden * (features + 1) + time * features * (hidden + 1)
    assert model.cost(Cut.everything()).macs == 2 * block + classes * (features + 1)


@pytest.mark.parametrize(
    ("width", "expected"), list(zip(FIFTHS, (47_038, 119_614, 217_790, 341_566, 490_942), strict=True))
)
def test_fjord_macs_of_the_femnist_cnn(width: Fraction, expected: int) -> None:
    model = network("femnist-cnn")
    assert model.cost(prefix(model.groups, width)).macs == expected


@pytest.mark.parametrize(
    ("width", "millions"), list(zip(FIFTHS, (23.1, 91.1, 203.0, 360.4, 555.4), strict=True))
)
def test_fjord_macs_of_resnet18(width: Fraction, millions: float) -> None:
    model = network("resnet18")
    assert round(model.cost(prefix(model.groups, width)).macs / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("width", "thousands"), list(zip(FIFTHS, (12.4, 40.2, 82.2, 141.9, 214.5), strict=True))
)
def test_fjord_parameters_of_the_character_lstm(width: Fraction, thousands: float) -> None:
    """The embedding keeps its 8 columns, as in the paper."""
    model = network("char-lstm")
    sliced = prefix(model.groups, width).channels
    channels = {group: units for group, units in sliced.items() if group not in model.embedded}
    assert round(model.cost(Cut.of(model.groups, channels)).params / 1000, 1) == thousands


def test_vgg9_parameters_and_convolution_macs() -> None:
    cost = network("vgg9").cost(Cut.everything())
    linear = 512 * (256 + 1) + 512 * (512 + 1) + 10 * (512 + 1)
    assert cost.params == 1_525_450
    assert round((cost.macs - linear) / 1e6, 1) == 133.2


class Tied(nn.Module):
    """One matrix embeds and decodes, and a frozen scale that is not a parameter of the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(F.relu(self.hidden(self.embedding(x)) * self.mask))


def test_shared_tensors_count_once_and_bytes_are_what_is_stored() -> None:
    model = elastic(Tied(), (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)))
    cost = model.cost(Cut.everything())
    assert cost.params == 11 * 6 + 6 * 6 + 6
    assert cost.bytes == 4 * cost.params + 8  # the counter is stored, the mask is not
    assert cost.macs == 3 * (6 * 7 + 11 * 6)


def test_costs_add_up() -> None:
    one = Cost(1, 2, 3, 4, 5)
    assert one + one == Cost(2, 4, 6, 8, 10)
    assert one + Cost(1, 1, 1) == Cost(2, 3, 4)


def test_label_rows_cost_less() -> None:
    """A cut into an output axis, as an update may credit single classes, is counted by itself."""
    model = mlp_model(8)
    (labels,) = model.groups.outputs
    cost = model.cost(Cut.of(model.groups, {labels: [1, 3]}))
    assert cost.params == 8 * 6 + 2 * 9
    assert cost.macs == cost.params
    assert cost.bytes == 4 * cost.params


def test_which_units_are_kept_does_not_matter() -> None:
    model = mlp_model(8)
    (group,) = model.groups.elastic
    costs = {model.cost(Cut.of(model.groups, {group: units})) for units in ([0, 1, 2], [1, 4, 7])}
    assert costs == {model.cost(prefix(model.groups, Fraction(3, 8)))}


class Dense(nn.Module):
    """Concatenation: an axis that several groups drive."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(7, 5, 3, padding=1)
        self.three, self.out = nn.Conv2d(12, 6, 1), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.cat([x, F.relu(self.one(x))], 1)
        second = torch.cat([first, F.relu(self.two(first))], 1)
        return self.out(F.relu(self.three(second)).mean((2, 3)))


def dense_model() -> ElasticModel:
    return elastic(Dense(), (torch.randn(2, 3, 8, 8), torch.arange(2)))


@pytest.mark.parametrize(
    "name",
    [
        slow_if(name, "llama", "mobilenetv2", "preresnet18", "resnet50", "transformer", "vit")
        for name in [*NETWORKS, "dense"]
    ],
)
def test_curves_agree_with_the_plain_small_network(name: str) -> None:
    model = dense_model() if name == "dense" else network(name, small=True)
    for limit in ("macs", "memory"):
        model.costs.record(limit)
    draws = np.random.default_rng(0)
    for batch_size in (2, 5):
        counts = tuple(int(draws.integers(1, width + 1)) for width in model.costs.full)
        workload = Workload(batch_size, optimiser_slots=1)
        expected = from_scratch(model, model.costs.cut(counts), workload)
        assert {limit: model.costs.measure(limit, counts, workload) for limit in expected} == expected


def test_a_cost_is_the_same_before_and_after_its_curve_was_recorded() -> None:
    model = cnn_model()
    cut = prefix(model.groups, Fraction(1, 2))
    before = model.cost(cut)
    model.costs.record("macs")
    assert model.cost(cut) == before


def test_models_with_recorded_curves_can_be_sent() -> None:
    model = mlp_model(8)
    model.costs.record("macs")
    twin = pickle.loads(pickle.dumps(model))
    assert twin.cost(Cut.everything()) == model.cost(Cut.everything())


def test_training_memory_by_hand() -> None:
    """Linear(5, 8), ReLU, Linear(8, 4): the loss saves its log-probabilities, the labels and their number."""
    model = mlp_model(8)
    parameters = 4 * (8 * 6 + 4 * 9)
    saved = 3 * (4 * 5 + 4 * 8 + 4 * 4 + 8) + 4
    for slots in (0, 1, 2):
        cost = model.cost(Cut.everything(), Workload(3, slots))
        assert cost.training_memory == 2 * parameters + (1 + slots) * parameters + saved
    assert model.cost(Cut.everything()).training_memory is None


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def test_frozen_layers_need_no_gradients() -> None:
    model = elastic(Frozen(), (torch.zeros(2, 5), torch.arange(2)))
    trained = 4 * (4 * 9)
    saved = 3 * (4 * 8 + 4 * 4 + 8) + 4  # neither the inputs nor anything else of the frozen layer
    expected = 2 * trained + 4 * 8 * 6 + trained + saved
    assert model.cost(Cut.everything(), Workload(3)).training_memory == expected


def test_code_that_looks_at_values_is_measured_on_real_tensors() -> None:
    def curious(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        factor = 2.0 if output.detach().mean().item() > 0 else 1.0
        return factor * F.cross_entropy(output, batch[1])

    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
    model = elastic(module, (torch.zeros(2, 5), torch.arange(2)), objective=Objective(curious))
    plain = mlp_model(8)
    for width in (Fraction(1, 2), Fraction(1)):
        memory = model.cost(prefix(model.groups, width), Workload(7)).training_memory
        assert memory == plain.cost(prefix(plain.groups, width), Workload(7)).training_memory


def test_estimating_moves_no_random_numbers_and_no_statistics() -> None:
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    model = elastic(module, (torch.randn(2, 5), torch.arange(2)))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model.cost(Cut.everything(), Workload(4))
    saved_parts(model, Cut.everything(), 4)
    model.costs.measure("step_time", model.costs.full, Workload(4))
    assert torch.equal(torch.rand(1), expected)
    assert int(module[1].num_batches_tracked) == 0


def test_step_time_is_measured() -> None:
    module = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 4))
    model = elastic(module, (torch.zeros(2, 512), torch.arange(2)))
    wide, narrow = ((1024,), (1,))
    workload = Workload(64, optimiser_slots=1)
    times = {counts: model.costs.measure("step_time", counts, workload) for counts in (wide, narrow)}
    assert times[wide] > times[narrow] > 1000  # nanoseconds
    assert model.costs.measure("step_time", wide, workload) == times[wide]  # measured once


@pytest.mark.parametrize(("batch_size", "slots"), [(0, 0), (1, -1)])
def test_workloads_that_make_no_sense(batch_size: int, slots: int) -> None:
    with pytest.raises(FedtailorError, match="expected at least"):
        Workload(batch_size, slots)


def benchmark_case(model: str, width: str) -> dict[str, int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--case", model, width]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, int] = json.loads(answer.stdout)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("width", ["1/4", "1/2", "1"])
@pytest.mark.parametrize("model", ["cnn", "resnet18", "mobilenetv2", "char-lstm"])
def test_training_memory_is_what_a_process_of_its_own_grows_by(model: str, width: str) -> None:
    case = benchmark_case(model, width)
    assert abs(case["estimate"] / case["growth"] - 1) <= 0.25
