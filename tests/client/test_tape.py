"""Steps from a tape: the bits of steps that nobody recorded, or no tape at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor
from fedtailor.client import tape, training
from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.client.recording import recorded
from fedtailor.data.batches import Batch, Examples, values_of
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.messages import Refused, Update
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.seeds import Seeds
from helpers import CLASSES, bits, client, federated, images, tiny_cnn, vectors, with_nan_inputs

COUNTS = (10, 9, 4, 11, 6, 10)  # in batches of 4: last ones of 1 to 4


def words() -> Examples:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(9, (sum(COUNTS), 5), generator=generator)
    return Examples.of(texts, texts.sum(1) % CLASSES)


def layers() -> nn.Module:
    """Vectors, by layers of many kinds."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 6), nn.Softplus(),
        nn.Linear(6, CLASSES),
    )  # fmt: skip


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


class Counting(nn.Module):
    """Divides by how often it was called: what a tape of it would never know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.calls = nn.Linear(5, 8), nn.Linear(8, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        answer: Tensor = self.out(F.relu(self.inner(x))) / self.calls
        return answer


NETWORKS: dict[str, tuple[Any, Any, bool]] = {  # how it is built, its data, whether its steps have tapes
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, CLASSES)), vectors, True),
    "layers": (layers, vectors, True),
    "convolutions and statistics": (tiny_cnn, images, True),
    "embedding": (embedding, None, True),
    "dropout": (dropping, vectors, False),
    "counting": (Counting, vectors, False),
}  # fmt: skip
LOCALS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {
        "momentum": 0.9,
        "weight_decay": 0.01,
        "decayed": "matrices",
        "clip_norm": 0.05,
        "epochs": 2,
    },
    "proximal": {
        "proximal": 0.1,
        "schedule_every": "step",
        "schedule": "exponential",
        "gamma": 0.5,
        "steps": 5,
    },
    "adamw": {"optimiser": "adamw", "lr": 0.01, "clip_norm": 0.5},
}


def model_and_data(name: str) -> tuple[ElasticModel, FederatedData]:
    build, examples, _ = NETWORKS[name]
    data = federated(words() if examples is None else examples(sum(COUNTS)), COUNTS)
    torch.manual_seed(0)
    return fedtailor.elastic(build(), data.example()), data


def trained(method: Method, model: ElasticModel, data: FederatedData, rounds: int = 2) -> list[Any]:
    """What clients answer in some rounds, each beginning with the first one's answer of the last."""
    found: list[Any] = []
    state, seeds = method.init(model), Seeds(3)
    for _ in range(rounds):
        widths = (1, 0.5) * 3 if isinstance(method, HeteroFL) else (1,) * 6
        clients = [
            client(n, width, count) for n, (width, count) in enumerate(zip(widths, COUNTS, strict=True))
        ]
        tasks = [method.assign(state, each, model, seeds) for each in clients]
        answers = list(InProcess(method, model, data).run(tasks))
        state = method.merge(state, [each for each in answers if isinstance(each, Update)], model)
        found += answers
    return found


def content(answers: list[Any]) -> list[Any]:
    return [
        (each.metrics, {name: bits(value) for name, value in each.patch.values.items()})
        if isinstance(each, Update)
        else (each.client, each.reason, each.detail)
        for each in answers
    ]


def tapes_of(model: ElasticModel) -> list[tape.Tape]:
    kept = model.once("steps", training.Left).pieces.values()
    return [each for steps in kept if steps.tapes for each in steps.tapes.known.values() if each is not None]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of step is recorded when it comes for the second time."""
    monkeypatch.setattr(tape, "LEAST_STEPS", 1)


def without_tapes(method: Method, model: ElasticModel, data: FederatedData) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "come_again", lambda *_: False)
        return trained(method, model, data)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_from_a_tape_have_the_bits_of_steps_that_nobody_recorded(name: str, local: str) -> None:
    settings: dict[str, Any] = {"lr": 0.3, "batch_size": 4, **LOCALS[local]}
    method = FedAvg(local=LocalTraining(**settings))
    (model, data), (other, _) = model_and_data(name), model_and_data(name)
    assert content(trained(method, model, data)) == content(without_tapes(method, other, data))
    assert bool(tapes_of(model)) == NETWORKS[name][2]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", ["mlp", "convolutions and statistics"])
def test_pieces_of_several_widths_have_tapes_of_their_own(name: str) -> None:
    method = HeteroFL(local=LocalTraining(lr=0.3, batch_size=4), masked_loss=False, label_rows=False)
    (model, data), (other, _) = model_and_data(name), model_and_data(name)
    assert content(trained(method, model, data)) == content(without_tapes(method, other, data))
    assert len({tuple(each.gradients[0].shape) for each in tapes_of(model)}) == 2


@pytest.mark.usefixtures("at_once")
def test_a_client_who_leaves_the_numbers_costs_nobody_else_anything() -> None:
    method = FedAvg(local=LocalTraining(lr=0.3, batch_size=4))
    (model, data), (other, _) = model_and_data("mlp"), model_and_data("mlp")
    broken = with_nan_inputs(data, 2)
    found = trained(method, model, broken)
    assert [each.client for each in found if isinstance(each, Refused)] == [2, 2]
    assert content(found) == content(without_tapes(method, other, broken))


@pytest.mark.usefixtures("at_once")
def test_examples_that_are_prepared_or_of_other_types_are_copied_to_where_the_tape_reads() -> None:
    method = FedAvg(local=LocalTraining(lr=0.3, batch_size=4))
    model, data = model_and_data("mlp")

    def doubled(batch: Batch, _: torch.Generator | None) -> Batch:
        inputs, labels = batch if isinstance(batch, tuple) else tuple(batch.values())
        return inputs * 2, labels

    columns = data.train.columns
    short = (columns[0], columns[1].to(torch.uint8)) if isinstance(columns, tuple) else columns
    for examples in (data.train.prepared_by(doubled), Examples(short)):
        own = federated(examples, COUNTS)
        assert content(trained(method, model, own)) == content(
            without_tapes(method, model_and_data("mlp")[0], own)
        )
    assert tapes_of(model)


@pytest.mark.usefixtures("at_once")
def test_what_was_sent_and_what_was_answered_stay_as_they_are() -> None:
    method = FedAvg(local=LocalTraining(lr=0.3, batch_size=4))
    model, data = model_and_data("mlp")
    answers = trained(method, model, data, rounds=1)
    before = copy.deepcopy(content(answers))
    trained(method, model, data)
    assert content(answers) == before


def test_a_copy_of_a_model_begins_without_what_its_clients_have_left() -> None:
    method = FedAvg(local=LocalTraining(lr=0.3, batch_size=4))
    model, data = model_and_data("mlp")
    trained(method, model, data)
    assert model.once("steps", training.Left).pieces
    assert not copy.deepcopy(model).once("steps", training.Left).pieces


def test_training_inside_training_has_steps_of_its_own() -> None:
    method = FedAvg(local=LocalTraining(lr=0.3, batch_size=4))
    model, _ = model_and_data("mlp")
    task = method.assign(method.init(model), client(0, 1, 10), model, Seeds(3))
    with training.steps_of(method, task, model) as outer, training.steps_of(method, task, model) as inner:
        assert isinstance(outer, LocalSteps)
        assert outer is not inner
    with training.steps_of(method, task, model) as again:
        assert again is outer


ALIKE = (10,) * 6  # in batches of 4: two whole ones and one of 2


@pytest.mark.parametrize("local", ["plain", "momentum", "proximal"])
@pytest.mark.parametrize("name", ["mlp", "embedding"])
def test_flocks_from_a_tape_have_the_bits_of_flocks_that_nobody_recorded(name: str, local: str) -> None:
    found = []
    settings: dict[str, Any] = {"lr": 0.3, "batch_size": 4, "together": 3, **LOCALS[local]}
    for least in (0, 10**6):
        _, examples, _ = NETWORKS[name]
        rows = torch.arange(sum(ALIKE)) % sum(COUNTS)
        data = federated((words() if examples is None else examples(sum(COUNTS))).subset(rows), ALIKE)
        model, _ = model_and_data(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape, "LEAST_STEPS", least)
            method = FedAvg(local=LocalTraining(**settings))
            state = method.init(model)
            found.append([])
            for _ in range(3):
                tasks = [method.assign(state, client(n, 1, 10), model, Seeds(3)) for n in range(6)]
                answers = list(InProcess(method, model, data).run(tasks))
                state = method.merge(state, answers, model)
                found[-1] += content(answers)
        kept = model.once("flocks", training.Left).pieces.values()
        assert len(kept) == 1  # both flocks, and those of all rounds, were one
        tapes = [each for flock in kept for each in flock.tapes.known.values() if each is not None]
        assert bool(tapes) == (least == 0)
    assert found[0] == found[1]


def test_few_steps_are_not_recorded() -> None:
    model, data = model_and_data("mlp")
    trained(FedAvg(local=LocalTraining(lr=0.3, batch_size=4)), model, data)
    assert not tapes_of(model)


class Sharing(nn.Module):
    """Two weights that have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(
            F.relu(F.linear(x, self.a.weight + self.b.weight, self.a.bias + self.b.bias))
        )
        return answer


class Halving(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x /= 2
        answer: Tensor = self.out(F.relu(self.inner(x)))
        return answer


class Adding(nn.Module):
    """Adds to a number that it makes anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        beyond = torch.tensor(0.0)
        beyond += torch.relu(x.max() - 2)
        answer: Tensor = self.out(F.relu(self.inner(x))) * (1 + beyond)
        return answer


def frozen_but_for_one() -> nn.Module:
    network = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, CLASSES, bias=False))
    network[0].weight.requires_grad_(False)
    return network


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("build", [Sharing, Halving, Adding, frozen_but_for_one, dropping])
def test_odd_networks_have_the_bits_of_steps_that_nobody_recorded(build: Any, local: str) -> None:
    method = FedAvg(local=LocalTraining(**{"lr": 0.3, "batch_size": 4, **LOCALS[local]}))
    found = []
    for with_tapes in (True, False):
        examples = vectors(sum(COUNTS))
        data = federated(examples, COUNTS)
        torch.manual_seed(0)
        model = fedtailor.elastic(build(), data.example())
        state = torch.get_rng_state()
        answers = trained(method, model, data) if with_tapes else without_tapes(method, model, data)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(content(answers))
    assert found[0] == found[1]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("together", [1, 2])
def test_widths_that_keep_the_same_channels_have_factors_of_their_own(together: int) -> None:
    """Half of eight channels and 0.45 of them are four, and HeteroFL's scaler divides by the width that was asked."""
    local = LocalTraining(lr=0.3, batch_size=4, together=together)
    method = HeteroFL(local=local, masked_loss=False, label_rows=False)
    found = []
    for least in (0, 10**6):
        model, data = model_and_data("mlp")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape, "LEAST_STEPS", least)
            state, seeds = method.init(model), Seeds(3)
            clients = [client(n, (0.5, 0.45)[n % 2], count) for n, count in enumerate(COUNTS)]
            tasks = [method.assign(state, each, model, seeds) for each in clients]
            found.append([content(InProcess(method, model, data).run(tasks)) for _ in range(2)])
    assert found[0] == found[1]


class Cooling(FedAvg):
    """A user's method that says that its clients are alike, and looks at the round."""

    alike = True  # type: ignore[assignment]

    def forward(self, weights: Any, cut: Any, batch: Batch, task: Any, model: ElasticModel) -> Any:
        return model.forward(weights, cut, batch, mode="train") / (1 + task.round)


@pytest.mark.usefixtures("at_once")
def test_hooks_of_users_are_called_in_every_step() -> None:
    method = Cooling(local=LocalTraining(lr=0.3, batch_size=4))
    (model, data), (other, _) = model_and_data("mlp"), model_and_data("mlp")
    assert content(trained(method, model, data)) == content(without_tapes(method, other, data))
    assert not tapes_of(model)


# What a tape cannot be made of


def leaf() -> Tensor:
    return torch.arange(6.0).view(2, 3).requires_grad_()


def try_to_record(step: Any, *leaves: Tensor) -> tape.Tape | None:
    return recorded(step, (torch.ones(3), torch.zeros(1)), leaves, leaves)


def test_a_step_is_recorded_and_leaves_nothing_behind() -> None:
    weight = leaf()
    before = bits(weight)
    found = try_to_record(lambda batch: F.relu(weight @ batch[0]).square().sum(), weight)
    assert found is not None
    assert weight.grad is None
    assert bits(weight) == before
    assert found.run((torch.tensor([1.0, 0.0, 2.0]), torch.zeros(1))) == 4.0**2 + 13.0**2
    assert torch.equal(found.gradients[0], torch.tensor([[8.0, 0.0, 16.0], [26.0, 0.0, 52.0]]))


def test_steps_that_draw_or_decide_by_numbers_or_leave_a_weight_alone_are_not() -> None:
    weight, unused = leaf(), leaf()
    state = torch.get_rng_state()
    assert try_to_record(lambda batch: F.dropout(weight @ batch[0]).sum(), weight) is None
    assert try_to_record(lambda batch: (weight @ batch[0]).sum() * weight.sum().item(), weight) is None
    assert try_to_record(lambda batch: weight[weight > 2].sum() + batch[0].sum(), weight) is None
    assert try_to_record(lambda batch: (weight @ batch[0]).sum(), weight, unused) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_long_steps_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = leaf()
    monkeypatch.setattr("fedtailor.client.recording.MOST_BYTES", 8)
    assert try_to_record(lambda batch: (weight @ batch[0]).sum(), weight) is None


def test_a_tensor_that_is_made_and_then_written_to_is_not_taken_for_constant() -> None:
    weight = leaf()

    def step(batch: Batch) -> Tensor:
        values = next(iter(values_of(batch)))
        total = torch.zeros(2)
        total = total.add_((weight @ values).detach())
        return (weight @ values * total).sum()

    found = try_to_record(step, weight)
    if found is not None:  # whether or not it can be, a second run must not add to the first
        assert found.run(found.batch) == found.run(found.batch)
