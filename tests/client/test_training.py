from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedtailor.client import training
from fedtailor.client.local_steps import Diverged
from fedtailor.client.local_training import LocalTraining
from fedtailor.client.training import batches
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.messages import Lease, Task
from fedtailor.method import Method
from fedtailor.seeds import Seeds
from helpers import (
    bits,
    client,
    cnn_model,
    group_of,
    images,
    mlp_model,
    snapshot,
    task_for,
    tiny_mlp,
    vectors,
)


def epoch_orders(task: Task, count: int, epochs: int) -> list[list[int]]:
    """The shuffles that the seeds promise."""
    generator = task.seeds.torch("batches", client=task.client.id, round=task.round)
    return [torch.randperm(count, generator=generator).tolist() for _ in range(epochs)]


def plain_training(module: nn.Module, data: Examples, local: LocalTraining, task: Task) -> float:
    """What anybody would write with torch.optim; returns the mean loss over the examples seen."""
    module.train()
    optimiser = torch.optim.SGD(
        module.parameters(),
        local.lr,
        local.momentum,
        weight_decay=local.weight_decay,
        nesterov=local.nesterov,
    )
    total = seen = 0.0
    for order in epoch_orders(task, len(data), local.epochs):
        for chosen in torch.tensor(order).split(local.batch_size):
            inputs, labels = data.take(chosen)
            optimiser.zero_grad()
            loss = cross_entropy(module(inputs), labels)
            loss.backward()
            if local.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), local.clip_norm)
            optimiser.step()
            total, seen = total + loss.item() * len(labels), seen + len(labels)
    return total / seen


SETTINGS = {
    "plain": LocalTraining(),
    "momentum": LocalTraining(momentum=0.9),
    "decay": LocalTraining(weight_decay=0.1),
    "both": LocalTraining(lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": LocalTraining(momentum=0.9, nesterov=True, weight_decay=0.01),
    "clipped": LocalTraining(lr=1.0, clip_norm=0.05),
    "clipped with momentum": LocalTraining(lr=1.0, clip_norm=0.05, momentum=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_full_network_trains_as_with_torch_optim_bit_for_bit(settings):
    local = replace(SETTINGS[settings], batch_size=4, epochs=3)
    data, model = vectors(10), mlp_model()
    task = task_for(model)
    patch, metrics = training.train(Method(local), task, data, model)
    module = copy.deepcopy(model.module)
    loss = plain_training(module, data, local, task)
    for name, value in module.state_dict().items():
        assert bits(patch.values[name]) == bits(value), name
    assert metrics == {"loss": pytest.approx(loss, abs=1e-6), "examples": 30.0}


@pytest.mark.parametrize("settings", ["plain", "both", "clipped"])
def test_a_network_with_norms_trains_as_with_torch_optim(settings):
    local = replace(SETTINGS[settings], batch_size=4, epochs=2)
    data, model = images(12), cnn_model()
    task = task_for(model)
    patch, _ = training.train(Method(local), task, data, model)
    module = copy.deepcopy(model.module)
    plain_training(module, data, local, task)
    assert patch.values.keys() == module.state_dict().keys()
    for (
        name,
        value,
    ) in module.state_dict().items():  # convolutions run in another memory layout: not bit for bit
        torch.testing.assert_close(patch.values[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_narrow_client_trains_a_plain_narrow_network(settings):
    local = replace(SETTINGS[settings], batch_size=4, epochs=2)
    data, model = vectors(10), mlp_model(8)
    task = task_for(model, prefix(model.groups, as_width("3/8")))
    patch, _ = training.train(Method(local), task, data, model)
    full, small = model.module.state_dict(), tiny_mlp(3)
    first = {"0.weight": full["0.weight"][:3], "0.bias": full["0.bias"][:3]}
    small.load_state_dict({**first, "2.weight": full["2.weight"][:, :3], "2.bias": full["2.bias"]})
    plain_training(small, data, local, task)
    for name, value in small.state_dict().items():
        assert bits(patch.values[name]) == bits(value), name


def test_training_leaves_the_task_and_the_data_as_they_were():
    data, model = images(8), cnn_model()
    task = task_for(model)
    before = snapshot(task.patch.values), bits(data.columns[0])
    patch, _ = training.train(Method(), task, data, model)
    assert (snapshot(task.patch.values), bits(data.columns[0])) == before
    assert all(not value.requires_grad and value.is_contiguous() for value in patch.values.values())


def test_frozen_parameters_stay():
    module = tiny_mlp()
    module[0].weight.requires_grad_(False)
    model = elastic(module, vectors(2).take(torch.arange(2)))
    task = task_for(model)
    patch, _ = training.train(Method(LocalTraining(weight_decay=0.1, momentum=0.9)), task, vectors(8), model)
    assert "0.weight" not in task.patch.values  # nobody sends what nobody trains
    assert bits(patch.values["2.weight"]) != bits(task.patch.values["2.weight"])


def test_only_what_the_lease_names_comes_back():
    model = cnn_model()
    task = task_for(model)
    task = replace(task, lease=Lease(frozenset({"0.weight"}), task.patch.cut))
    patch, _ = training.train(Method(), task, images(8), model)
    assert set(patch.values) == {"0.weight"}


# How long, and in which batches


def taken(local: LocalTraining, count: int, *, skip_single: bool = False) -> list[list[int]]:
    """The examples of every batch; example i has input i."""
    data = Examples.of(
        torch.arange(count, dtype=torch.float32)[:, None], torch.zeros(count, dtype=torch.int64)
    )
    drawn = batches(local, task_for(mlp_model()), data, skip_single=skip_single)
    return [[int(entry) for entry in batch[0].flatten()] for batch in drawn]


@pytest.mark.parametrize(
    ("count", "size", "epochs"), [(10, 4, 1), (10, 4, 3), (8, 4, 2), (3, 32, 2), (1, 1, 2)]
)
def test_every_epoch_sees_every_example_once(count, size, epochs):
    drawn = taken(LocalTraining(batch_size=size, epochs=epochs), count)
    per_epoch = math.ceil(count / size)
    assert len(drawn) == epochs * per_epoch
    orders = epoch_orders(task_for(mlp_model()), count, epochs)
    for epoch in range(epochs):
        seen = [example for batch in drawn[epoch * per_epoch : (epoch + 1) * per_epoch] for example in batch]
        assert seen == orders[epoch]
        assert sorted(seen) == list(range(count))
    assert all(len(batch) == size for batch in drawn if batch is not drawn[-1] and len(batch) > count % size)
    if count > 3 and epochs > 1:
        assert orders[0] != orders[1]


@pytest.mark.parametrize(("count", "size", "steps", "sizes"), [
    (10, 4, 2, [4, 4]),
    (10, 4, 5, [4, 4, 2, 4, 4]),
    (3, 4, 3, [3, 3, 3]),
    (8, 4, 1, [4]),
])  # fmt: skip
def test_a_fixed_number_of_steps_cycles_through_the_data(count, size, steps, sizes):
    drawn = taken(LocalTraining(batch_size=size, steps=steps, epochs=7), count)
    assert [len(batch) for batch in drawn] == sizes


def test_a_remainder_of_one_example_is_left_out_under_batch_norm_only():
    local = LocalTraining(batch_size=4, epochs=2)
    assert [len(batch) for batch in taken(local, 9, skip_single=True)] == [4, 4, 4, 4]
    assert [len(batch) for batch in taken(local, 9)] == [4, 4, 1, 4, 4, 1]
    steps = LocalTraining(batch_size=4, steps=3)
    assert [len(batch) for batch in taken(steps, 9, skip_single=True)] == [4, 4, 4]


def test_training_with_a_remainder_of_one_example_under_batch_norm():
    model, data = cnn_model(), images(9)
    patch, metrics = training.train(Method(LocalTraining(batch_size=4)), task_for(model), data, model)
    assert metrics["examples"] == 8
    assert all(bool(value.isfinite().all()) for value in patch.values.values())


def test_batch_norm_without_statistics_needs_two_examples_too():
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))
    model = elastic(module, vectors(2).take(torch.arange(2)))
    assert model.statistics == ()
    _, metrics = training.train(Method(LocalTraining(batch_size=4)), task_for(model), vectors(5), model)
    assert metrics["examples"] == 4


@pytest.mark.parametrize("local", [LocalTraining(), LocalTraining(steps=3)])
def test_one_example_under_batch_norm_is_too_few(local):
    model = cnn_model()
    with pytest.raises(Diverged, match=r"client 3 has 1 example\(s\): too few for one batch"):
        training.train(Method(local), task_for(model, number=3), images(1), model)


@pytest.mark.parametrize("changes", [{"round": 1}, {"client": client(1)}, {"seeds": Seeds(1)}])
def test_the_shuffle_depends_on_round_client_and_seed(changes):
    model, data = mlp_model(), vectors(12)
    task, local = task_for(model), LocalTraining(batch_size=4)
    same = [batch[0] for batch in batches(local, task, data, skip_single=False)]
    again = [batch[0] for batch in batches(local, task, data, skip_single=False)]
    other = [batch[0] for batch in batches(local, replace(task, **changes), data, skip_single=False)]
    assert all(torch.equal(one, two) for one, two in zip(same, again, strict=True))
    assert not torch.equal(torch.cat(same), torch.cat(other))


def test_augmentation_gets_a_generator_in_training():
    drawn = []

    def preparation(batch, generator):
        drawn.append(torch.rand((), generator=generator).item() if generator is not None else None)
        return batch

    data, model = vectors(8), mlp_model()
    data = Examples(data.columns, preparation=preparation)
    for _ in range(2):
        training.train(Method(LocalTraining(batch_size=4)), task_for(model), data, model)
    assert len(drawn) == 4
    assert None not in drawn
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_dict_batches_train_like_tuples():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = tiny_mlp()

        def forward(self, x):
            return self.layers(x)

    data, named = vectors(10), Named()
    columns = {"x": data.columns[0], "label": data.columns[1]}
    as_dict = Examples.named(columns)
    model = elastic(tiny_mlp(), data.take(torch.arange(2)))
    other = elastic(named, as_dict.take(torch.arange(2)))
    local = LocalTraining(batch_size=4)
    patch, metrics = training.train(Method(local), task_for(model), data, model)
    from_dict, same = training.train(Method(local), task_for(other), as_dict, other)
    assert metrics == same
    for name, value in patch.values.items():
        assert bits(from_dict.values[f"layers.{name}"]) == bits(value)


def test_divergence_says_who_and_when():
    model = mlp_model()
    data = Examples.of(torch.full((4, 5), math.nan), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(Diverged, match="the loss of client 6 became nan in step 0"):
        training.train(Method(), task_for(model, number=6), data, model)


# Several networks in one step: nested cuts

HIDDEN, STEPS = 8, 5


@dataclass(frozen=True)
class Nested(Method):
    """Runs the given parts of the hidden layer, one list of parts per step."""

    parts: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def step_cuts(self, task, step, model):
        group = group_of(model, "0.weight", 0)
        return [Cut.of(model.groups, {group: part}) for part in self.parts[step % len(self.parts)]]


class NestedActive(Nested):
    inactive: ClassVar = "active"


def hand_computed(method: Nested, model, held: list[int], data: Examples, task: Task, *, active_only: bool):
    """Full-size gradients of sliced weights; momentum, decay and pull on everything, or where the step was."""
    local = method.local
    position = {unit: index for index, unit in enumerate(held)}
    full = {name: value.detach() for name, value in model.module.state_dict().items()}
    weights = {
        "0.weight": full["0.weight"][held].clone(),
        "0.bias": full["0.bias"][held].clone(),
        "2.weight": full["2.weight"][:, held].clone(),
        "2.bias": full["2.bias"].clone(),
    }
    momenta, start = {name: torch.zeros_like(value) for name, value in weights.items()}, dict(weights)
    chosen = [
        order
        for epoch in epoch_orders(task, len(data), STEPS)
        for order in torch.tensor(epoch).split(local.batch_size)
    ]
    for step in range(STEPS):
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        inputs, labels = data.take(chosen[step])
        active = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in weights.items()}
        losses = []
        for part in method.parts[step % len(method.parts)]:
            units = [position[unit] for unit in part]
            hidden = torch.relu(inputs @ leaves["0.weight"][units].T + leaves["0.bias"][units])
            losses.append(cross_entropy(hidden @ leaves["2.weight"][:, units].T + leaves["2.bias"], labels))
            active["0.weight"][units] = active["0.bias"][units] = active["2.weight"][:, units] = True
            active["2.bias"][:] = True
        (sum(losses) / len(losses)).backward()
        moves = active if active_only else {name: torch.ones_like(mask) for name, mask in active.items()}
        pulled = {n: leaf.grad + local.proximal * (weights[n] - start[n]) for n, leaf in leaves.items()}
        norm = torch.sqrt(sum(gradient[moves[name]].square().sum() for name, gradient in pulled.items()))
        shrink = min(1.0, local.clip_norm / (norm.item() + 1e-6))
        for name, where in moves.items():
            gradient = pulled[name] * shrink + local.weight_decay * weights[name]
            momentum = local.momentum * momenta[name] + gradient
            move = gradient + local.momentum * momentum if local.nesterov else momentum
            momenta[name] = torch.where(where, momentum, momenta[name])
            weights[name] = torch.where(where, weights[name] - local.lr * move, weights[name])
    return weights


HELD = [0, 1, 2, 4, 6, 7]  # not a prefix
PARTS = {
    "one narrow": (((0, 1),),),
    "alternating": (((0, 1, 2),), ((0, 1, 2, 4, 6, 7),), ((4, 7),)),
    "teacher and student": (((0, 1, 2, 4, 6, 7), (0, 1)),),
    "nested below the held": (((0, 1, 2), (1, 2)),),
    "three": (((0, 1, 2, 4, 6, 7), (0, 1, 2, 4), (0, 1)),),
    "twice the same": (((0, 1), (0, 1)),),
    "the held one twice": (((0, 1, 2, 4, 6, 7), (0, 1, 2, 4, 6, 7)),),
}
LOCALS = {
    "plain": LocalTraining(batch_size=4, steps=STEPS),
    "momentum": LocalTraining(batch_size=4, steps=STEPS, momentum=0.9),
    "decay": LocalTraining(batch_size=4, steps=STEPS, weight_decay=0.3),
    "proximal": LocalTraining(batch_size=4, steps=STEPS, proximal=0.7, momentum=0.5, clip_norm=0.3),
    "all": LocalTraining(
        batch_size=4, steps=STEPS, momentum=0.8, weight_decay=0.1, nesterov=True, clip_norm=0.2, lr=0.3
    ),
}


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", [Nested, NestedActive])
def test_nested_cuts_train_as_computed_by_hand(kind, parts, local):
    model, data = mlp_model(HIDDEN), vectors(10)
    task = task_for(model, Cut.of(model.groups, {group_of(model, "0.weight", 0): HELD}))
    method = kind(local=LOCALS[local], parts=PARTS[parts])
    patch, _ = training.train(method, task, data, model)
    expected = hand_computed(method, model, HELD, data, task, active_only=kind is NestedActive)
    for name, value in expected.items():
        torch.testing.assert_close(patch.values[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("local", LOCALS)
def test_coordinates_outside_the_cuts_rest_bit_for_bit_under_the_active_policy(local):
    model, data = mlp_model(HIDDEN), vectors(10)
    task = task_for(model, Cut.of(model.groups, {group_of(model, "0.weight", 0): HELD}))
    outside = [3, 4, 5]  # units 4, 6, 7 of the held six

    def rest(kind) -> tuple[bool, bool]:
        method = kind(local=LOCALS[local], parts=(((0, 1, 2), (0, 1)), ((0, 2),)))
        patch, _ = training.train(method, task, data, model)

        def same(pick) -> bool:
            return all(
                bits(pick(patch.values, name)) == bits(pick(task.patch.values, name))
                for name in ("0.weight", "0.bias")
            ) and bits(patch.values["2.weight"][:, outside]) == bits(
                task.patch.values["2.weight"][:, outside]
            )

        inside = bits(patch.values["0.weight"][:3]) == bits(task.patch.values["0.weight"][:3])
        return same(lambda values, name: values[name][outside]), inside

    assert rest(NestedActive) == (True, False)
    decays = LOCALS[local].weight_decay > 0
    assert rest(Nested) == (not decays, False)  # momentum starts at zero there, so only decay moves them


def test_momentum_moves_what_an_earlier_step_touched_under_the_held_policy_only():
    model, data = mlp_model(HIDDEN), vectors(10)
    task = task_for(model, Cut.everything())
    wide, narrow = tuple(range(HIDDEN)), (0, 1)
    local = replace(LOCALS["momentum"], steps=2)
    one_step = replace(local, steps=1)
    for kind, moves in ((Nested, True), (NestedActive, False)):
        first, _ = training.train(kind(local=one_step, parts=((wide,), (narrow,))), task, data, model)
        second, _ = training.train(kind(local=local, parts=((wide,), (narrow,))), task, data, model)
        assert (bits(first.values["0.weight"][2:]) != bits(second.values["0.weight"][2:])) == moves
        assert bits(first.values["0.weight"][:2]) != bits(second.values["0.weight"][:2])


CROSSING = (((0, 1), (1, 2)),)


@pytest.mark.parametrize(("kind", "local"), [(Nested, "all"), (Nested, "plain"), (NestedActive, "plain")])
def test_cuts_that_cross_train_as_computed_by_hand(kind, local):
    model, data = mlp_model(HIDDEN), vectors(10)
    task = task_for(model, Cut.of(model.groups, {group_of(model, "0.weight", 0): HELD}))
    method = kind(local=LOCALS[local], parts=CROSSING)
    patch, _ = training.train(method, task, data, model)
    expected = hand_computed(method, model, HELD, data, task, active_only=kind is NestedActive)
    for name, value in expected.items():
        torch.testing.assert_close(patch.values[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("local", ["momentum", "decay", "proximal", "all"])
def test_cuts_that_cross_are_refused_where_inactive_coordinates_would_move(local):
    model = mlp_model(HIDDEN)
    with pytest.raises(FedtailorError, match="step_cuts = .*expected cuts inside one another"):
        training.train(NestedActive(local=LOCALS[local], parts=CROSSING), task_for(model), vectors(10), model)


def test_a_step_cut_outside_the_held_one_is_refused():
    model = mlp_model(HIDDEN)
    task = task_for(model, Cut.of(model.groups, {group_of(model, "0.weight", 0): [0, 1]}))
    with pytest.raises(FedtailorError, match="a cut can only be narrowed to a part of itself"):
        training.train(Nested(parts=(((2,),),)), task, vectors(4), model)


def test_running_statistics_belong_to_the_held_width_alone():
    """A step at a smaller width must not mix its statistics into those of the held one."""

    @dataclass(frozen=True)
    class Narrow(Method):
        def step_cuts(self, task, step, model):
            return [prefix(model.groups, as_width("1/2"))]

    model, data = cnn_model(), images(8)
    task = task_for(model)
    patch, _ = training.train(Narrow(), task, data, model)
    for name in model.statistics:
        assert bits(patch.values[name]) == bits(task.patch.values[name])
    assert bits(patch.values["0.weight"]) != bits(task.patch.values["0.weight"])


# The settings


def rates(local: LocalTraining, rounds) -> list[float]:
    return [local.rate(round_) for round_ in rounds]


def test_constant_rate():
    assert rates(LocalTraining(lr=0.3), (0, 1, 10**6)) == [0.3] * 3


def test_exponential_rate_needs_no_length():
    local = LocalTraining(lr=0.1, schedule="exponential", gamma=0.998)
    assert rates(local, (0, 1, 100)) == [0.1, 0.1 * 0.998, 0.1 * 0.998**100]


def test_cosine_rate_goes_from_the_whole_to_zero():
    local = LocalTraining(lr=0.2, schedule="cosine", rounds=10)
    assert rates(local, (0, 5)) == pytest.approx([0.2, 0.1])
    assert local.rate(1) == pytest.approx(0.2 * 0.5 * (1 + math.cos(math.pi / 10)))
    assert local.rate(10) == pytest.approx(0, abs=1e-12)
    assert local.rate(20) == pytest.approx(0, abs=1e-12)


def test_steps_at_rounds_and_at_shares_of_all_rounds():
    absolute = LocalTraining(lr=1.0, schedule="steps", milestones=(3, 5), gamma=0.1, rounds=8)
    expected = [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01]
    assert rates(absolute, range(8)) == pytest.approx(expected)
    shares = replace(absolute, milestones=(0.375, 0.625))
    assert rates(shares, range(8)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "rounds", "milestone"), [(0.14, 50, 7), (0.07, 100, 7), (0.28, 25, 7), (0.5, 9, 5)]
)
def test_a_share_of_the_rounds_is_exact(share, rounds, milestone):
    """In floats 0.07 * 100 is 7.000000000000001, and the rate would fall one round late."""
    local = LocalTraining(lr=1.0, schedule="steps", milestones=(share,), gamma=0.5, rounds=rounds)
    assert next(round_ for round_ in range(rounds) if local.rate(round_) < 1) == milestone


@pytest.mark.parametrize("schedule", ["steps", "cosine"])
def test_schedules_over_the_run_need_its_length(schedule):
    with pytest.raises(FedtailorError, match=f"training.schedule = '{schedule}' needs training.rounds"):
        LocalTraining(schedule=schedule).rate(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, "training.lr = 0: expected a number above 0"),
        ({"lr": -0.1}, "training.lr = -0.1: expected a number above 0"),
        ({"lr": math.nan}, "training.lr = nan: expected a number above 0"),
        ({"lr": math.inf}, "training.lr = inf: expected a number above 0"),
        ({"momentum": 1.0}, "training.momentum = 1.0: expected at least 0 and below 1"),
        ({"momentum": -0.1}, "training.momentum = -0.1: expected at least 0 and below 1"),
        ({"momentum": math.nan}, "training.momentum = nan: expected at least 0 and below 1"),
        ({"weight_decay": -1e-4}, "training.weight_decay = -0.0001: expected at least 0"),
        ({"weight_decay": math.nan}, "training.weight_decay = nan: expected at least 0"),
        ({"weight_decay": math.inf}, "training.weight_decay = inf: expected at least 0"),
        ({"batch_size": 0}, "training.batch_size = 0: expected at least 1"),
        ({"epochs": 0}, "training.epochs = 0: expected at least 1"),
        ({"steps": 0}, "training.steps = 0: expected at least 1"),
        ({"clip_norm": 0}, "training.clip_norm = 0: expected above 0; inf does not clip"),
        ({"clip_norm": math.nan}, "training.clip_norm = nan: expected above 0; inf does not clip"),
        ({"proximal": -1}, "training.proximal = -1: expected at least 0"),
        ({"proximal": math.nan}, "training.proximal = nan: expected at least 0"),
        ({"gamma": 0}, "training.gamma = 0: expected above 0 and at most 1"),
        ({"gamma": 1.5}, "training.gamma = 1.5: expected above 0 and at most 1"),
        ({"nesterov": True}, "training.nesterov = True: expected momentum above 0 with it"),
        ({"schedule": "cosin"}, "training.schedule = 'cosin': expected one of constant, steps, cosine, exponential"),
        ({"milestones": (0.0,)}, "training.milestones = (0.0,): expected rounds, or shares"),
        ({"milestones": (math.nan,)}, "training.milestones = (nan,): expected rounds, or shares"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(FedtailorError) as caught:
        LocalTraining(**settings)
    assert str(caught.value).startswith(message)


def test_the_types_of_tensors_survive_training():
    model = elastic(tiny_mlp().double(), tuple(_double(entry) for entry in vectors(2).take(torch.arange(2))))
    inputs, labels = vectors(8).columns
    patch, _ = training.train(Method(), task_for(model), Examples((inputs.double(), labels)), model)
    assert {value.dtype for value in patch.values.values()} == {torch.float64}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
