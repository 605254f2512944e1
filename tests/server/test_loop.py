from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.messages import Client, Refused, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.server.setup import RoundSettings
from helpers import cnn_model, differing, image_data, mlp_model, run, timeless, vector_data

METHODS = ["fedavg", "heterofl"]


@dataclass(frozen=True)
class Watching:
    """An engine that keeps everything that passes through it, and may answer in reverse."""

    inner: InProcess
    seen: list[tuple[Task, Update | Refused]]
    backwards: bool = False

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused]:
        pairs = list(zip(tasks, self.inner.run(tasks), strict=True))
        self.seen.extend(pairs)
        yield from (answer for _, answer in (reversed(pairs) if self.backwards else pairs))


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(name):
    method, model, data = get_method(name)(), cnn_model(), image_data()
    settings: dict[str, Any] = {"fleet": "uniform-2", "rounds": 3, "cohort": 3, "every": 2}
    first, second, other = (run(method, model, data, seed=seed, **settings) for seed in (4, 4, 5))
    assert differing(first.state.weights, second.state.weights) == set()
    assert timeless(first.records) == timeless(second.records)
    assert differing(first.state.weights, other.state.weights) != set()


def test_dropout_is_seeded_too():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4))
    data = vector_data()
    model = elastic(module, data.example())
    method = get_method("fedavg")()
    torch.manual_seed(1)
    first = run(method, model, data, rounds=2)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = run(method, model, data, rounds=2)
    assert differing(first.state.weights, second.state.weights) == set()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", METHODS)
def test_the_order_in_which_clients_answer_does_not_matter(name):
    method, model, data = get_method(name)(), cnn_model(), image_data((6, 5, 7, 4, 9, 6))
    forward = run(method, model, data, "uniform-3", rounds=2, engine=lambda e: Watching(e, []))
    reverse = run(
        method, model, data, "uniform-3", rounds=2, engine=lambda e: Watching(e, [], backwards=True)
    )
    assert differing(forward.state.weights, reverse.state.weights) == set()


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_the_sizes_of_what_travels(name):
    method, model, data = get_method(name)(), cnn_model(), image_data((6, 5, 7, 4))
    seen: list[tuple[Task, Update | Refused]] = []
    result = run(method, model, data, "uniform-2", rounds=2, cohort=3, engine=lambda e: Watching(e, seen))
    for number, record in enumerate(result.records):
        pairs = [(task, answer) for task, answer in seen if task.round == number and task.action == "train"]
        assert record.cohort.asked == len(pairs) == 3
        down = [value for task, _ in pairs for value in task.patch.values.values()]
        up = [value for _, answer in pairs for value in answer.patch.values.values()]
        assert record.training.bytes_down == sum(value.numel() * value.element_size() for value in down)
        assert record.training.bytes_up == sum(value.numel() * value.element_size() for value in up)


def test_what_travels_has_the_size_of_the_cut_and_nothing_more():
    """tiny_cnn of 4 and 6 channels at width 1/2, without statistics: 4 bytes for every number that a client holds."""
    method, model = get_method("heterofl")(label_rows=False, masked_loss=False), cnn_model(4, 6)
    record = run(method, model, image_data((6,)), "equal-0.5").records[0]
    numbers = (2 * 9 + 2) + 2 * 2 + (3 * 2 * 9 + 3) + 2 * 3 + (4 * 12 + 4)
    assert (record.training.bytes_down, record.training.bytes_up) == (4 * numbers, 4 * numbers)


def test_averaged_statistics_travel_with_the_weights():
    record = run(get_method("fedavg")(), cnn_model(4, 6), image_data((6,)), "equal").records[0]
    numbers = (4 * 9 + 4) + 2 * 4 + (6 * 4 * 9 + 6) + 2 * 6 + (4 * 24 + 4)
    assert record.training.bytes_down == record.training.bytes_up == 4 * (numbers + 2 * 4 + 2 * 6) + 2 * 8


def test_label_rows_save_bytes_on_the_way_up():
    method, model = get_method("heterofl")(), cnn_model()
    record = run(method, model, image_data((2,)), "equal").records[0]  # labels 0 and 1 of four
    assert record.training.bytes_down - record.training.bytes_up == 4 * 2 * (24 + 1)


def test_macs_are_three_forward_passes_for_every_example_that_was_trained_on():
    method, model = get_method("fedavg")(local=LocalTraining(epochs=2)), mlp_model(8)
    record = run(method, model, vector_data((6, 3)), "equal").records[0]
    forward = 5 * 8 + 8 + 8 * 4 + 4
    assert record.training.macs == 3 * forward * (6 + 3) * 2


def test_rows_say_what_happened():
    seen: list[tuple[Task, Update | Refused]] = []
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data((6, 3, 5))
    result = run(
        method, model, data, "uniform-2", rounds=5, every=2, cohort=2, engine=lambda e: Watching(e, seen)
    )
    assert [record.round for record in result.records] == [1, 2, 3, 4, 5]
    assert [sorted(record.tiers or {}) for record in result.records] == [
        [],
        ["0.5", "1"],
        [],
        ["0.5", "1"],
        ["0.5", "1"],
    ]
    assert result.state.round == 5
    for number, record in enumerate(result.records):
        answers = [answer for task, answer in seen if task.round == number]
        assert record.cohort.asked == len(answers) == 2
        assert record.cohort.refused == {}
        assert record.seconds >= 0
        losses = sum(answer.metrics["loss"] * answer.weight for answer in answers)
        assert record.train_loss == pytest.approx(losses / sum(answer.weight for answer in answers))


@dataclass(frozen=True)
class NanForOne(Method):
    """Plain averaging, but the loss of client 2 is NaN."""

    def loss(self, outputs, weights, batch, task, model):
        loss = super().loss(outputs, weights, batch, task, model)
        return loss * math.nan if task.client.id == 2 else loss


@dataclass(frozen=True)
class NanGradientForOne(Method):
    """The loss of client 2 is finite, its gradient is not: the root of zero has an infinite slope."""

    def loss(self, outputs, weights, batch, task, model):
        loss = super().loss(outputs, weights, batch, task, model)
        return loss + (outputs[0].sum() * 0).sqrt() if task.client.id == 2 else loss


@pytest.mark.parametrize(
    ("method", "reason"), [(NanForOne(), "diverged"), (NanGradientForOne(), "non-finite")]
)
def test_a_client_that_diverges_is_refused_and_counted_and_the_run_goes_on(method, reason):
    model, data = mlp_model(), vector_data((6, 5, 7, 4))
    bad = run(method, model, data, rounds=2)
    others = run(method, model, data, rounds=2, engine=lambda e: Without(e, 2))
    assert [record.cohort.refused for record in bad.records] == [{reason: 1}] * 2
    assert [record.cohort.asked for record in bad.records] == [4, 4]
    assert differing(bad.state.weights, others.state.weights) == set()
    assert differing(bad.state.weights, model.weights()) != set()
    assert math.isfinite(bad.records[-1].tiers["1"]["loss"])
    assert math.isfinite(bad.records[-1].train_loss)


@dataclass(frozen=True)
class Without:
    inner: InProcess
    client: int

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused]:
        return self.inner.run([task for task in tasks if task.client.id != self.client])


@dataclass(frozen=True)
class Remembering(Method):
    """Keeps in each client's memory how often it took part, and in the server's how many answered."""

    def init(self, model):
        return replace(super().init(model), memory={"answers": [], "tiers": []})

    def participants(self, state, clients, model):
        return [client for client in clients if client.id % 2 == 0]

    def prepare(self, task, data, model):
        times = task.memory.get("times", torch.zeros(()))
        assert (times == 0) == (task.memory_round == -1)
        return replace(task, memory={"times": times + 1, "round": torch.tensor(task.memory_round)})

    def merge(self, state, updates, model):
        merged = super().merge(state, updates, model)
        answers = [
            (update.client, int(update.memory["times"]), int(update.memory["round"])) for update in updates
        ]
        return replace(merged, memory={**state.memory, "answers": [*state.memory["answers"], answers]})

    def observe(self, state: ServerState, evaluation):
        return replace(state, memory={**state.memory, "tiers": [*state.memory["tiers"], sorted(evaluation)]})


def test_hooks_see_their_memories_and_only_participants_are_sampled():
    method, model, data = Remembering(), mlp_model(), vector_data((3, 3, 3, 3))
    memory = run(method, model, data, "uniform-2", rounds=3, every=2).state.memory
    assert memory["answers"] == [[(0, 1, -1), (2, 1, -1)], [(0, 2, 0), (2, 2, 0)], [(0, 3, 1), (2, 3, 1)]]
    assert memory["tiers"] == [["0.5", "1"]] * 2


@dataclass(frozen=True)
class Nobody(Method):
    def participants(
        self, state: ServerState, clients: Sequence[Client], model: ElasticModel
    ) -> Sequence[Client]:
        return []


def test_a_round_in_which_nobody_may_take_part_keeps_the_weights():
    model = mlp_model()
    result = run(Nobody(), model, vector_data(), rounds=2)
    assert result.state.round == 2
    assert differing(result.state.weights, model.weights()) == set()
    first = result.records[0]
    assert (first.cohort.asked, first.train_loss, first.training.bytes_up) == (0, None, 0)


def test_tasks_carry_their_slot_and_the_clients_of_the_round():
    seen: list[tuple[Task, Update | Refused]] = []
    fleet = fleet_by_name("uniform-2", dynamic=True)
    run(
        get_method("fedavg")(),
        mlp_model(),
        vector_data((2,) * 8),
        fleet,
        rounds=4,
        cohort=3,
        engine=lambda e: Watching(e, seen),
    )
    tasks = [task for task, _ in seen]
    assert [task.client.slot for task in tasks] == [0, 1, 2] * 4
    assert [task.round for task in tasks] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert all(
        list(ids) == sorted(ids)
        for ids in ([task.client.id for task in tasks[i : i + 3]] for i in (0, 3, 6, 9))
    )
    assert {task.client.tier for task in tasks} == {"0.5", "1"}


def test_the_learning_rate_follows_the_round():
    """A rate of practically zero from round 1 on: only the first round moves the weights."""
    local = LocalTraining(schedule="exponential", gamma=1e-30)
    method, model, data = get_method("fedavg")(local=local), mlp_model(), vector_data()
    one, three = (run(method, model, data, rounds=rounds).state.weights for rounds in (1, 3))
    assert differing(one, model.weights()) == set(one)
    assert differing(one, three) == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds = 0: expected at least 1"),
        ({"clients_per_round": 0}, "clients_per_round = 0: expected at least 1"),
        ({"evaluate_every": 0}, "evaluate_every = 0: expected auto, or at least 1"),
        ({"rounds": -3}, "rounds = -3: expected at least 1"),
    ],
)
def test_settings_that_make_no_run(settings, message):
    with pytest.raises(FedtailorError) as caught:
        RoundSettings(**settings)
    assert str(caught.value) == message
