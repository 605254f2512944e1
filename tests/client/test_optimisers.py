"""Local optimisers against torch.optim, on whole networks and on parts; rates, accumulation, bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedtailor.client import precision, training
from fedtailor.client.local_steps import parts_of
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fjord.fjord import FjORD
from helpers import bits, cnn_model, differing, group_of, images, mlp_model, task_for, vectors

ADAMW = LocalTraining(optimiser="adamw", lr=0.01, weight_decay=0.1, batch_size=4, epochs=3)


def batches_of(task: Task, data: Examples, local: LocalTraining) -> list[Any]:
    return list(training.batches(local, task, data, skip_single=False))


def plain_training(
    module: nn.Module, optimiser: torch.optim.Optimizer, task: Task, data: Examples, local: LocalTraining
) -> None:
    """What anybody would write."""
    for inputs, labels in batches_of(task, data, local):
        optimiser.zero_grad()
        cross_entropy(module(inputs), labels).backward()
        nn.utils.clip_grad_norm_(module.parameters(), local.clip_norm)
        optimiser.step()


Build = Callable[[nn.Module], torch.optim.Optimizer]
CASES: dict[str, tuple[LocalTraining, Build]] = {
    "adam": (
        replace(ADAMW, optimiser="adam", weight_decay=0.0, options={"betas": [0.8, 0.95], "eps": 1e-4}),
        lambda module: torch.optim.Adam(module.parameters(), 0.01, (0.8, 0.95), 1e-4),
    ),
    "adamw": (
        replace(ADAMW, options={"amsgrad": True}, clip_norm=0.5),
        lambda module: torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1, amsgrad=True),
    ),
    "adamw, matrices": (
        replace(ADAMW, decayed="matrices"),
        lambda module: torch.optim.AdamW(
            [
                {"params": [module[0].weight, module[2].weight], "weight_decay": 0.1},
                {"params": [module[0].bias, module[2].bias], "weight_decay": 0.0},
            ],
            0.01,
        ),
    ),
    "sgd, matrices": (
        LocalTraining(momentum=0.9, weight_decay=0.1, decayed="matrices", batch_size=4, epochs=3),
        lambda module: torch.optim.SGD(
            [
                {"params": [module[0].weight, module[2].weight], "weight_decay": 0.1},
                {"params": [module[0].bias, module[2].bias]},
            ],
            0.1,
            0.9,
        ),
    ),
    "rmsprop": (
        replace(ADAMW, optimiser="torch.optim:RMSprop", momentum=0.5, options={"alpha": 0.9}),
        lambda module: torch.optim.RMSprop(
            module.parameters(), 0.01, alpha=0.9, weight_decay=0.1, momentum=0.5
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_full_network_trains_as_with_torch_optim_bit_for_bit(case):
    local, build = CASES[case]
    model, data = mlp_model(), vectors(10)
    task, module = task_for(model), copy.deepcopy(model.module)
    patch, _ = training.train(Method(local), task, data, model)
    plain_training(module, build(module), task, data, local)
    assert differing(patch.values, module.state_dict()) == set()


# Parts of what is held

HIDDEN = 8


@dataclass(frozen=True)
class Nested(Method):
    """Runs one part of the hidden layer per step."""

    parts: tuple[tuple[int, ...], ...] = ()

    def step_cuts(self, task, step, model):
        return [Cut.of(model.groups, {group_of(model, "0.weight", 0): self.parts[step % len(self.parts)]})]


class NestedActive(Nested):
    inactive: ClassVar = "active"


PARTS = ((0, 1, 2), tuple(range(HIDDEN)), (4, 6), (0, 1))


def by_hand(method: Nested, task: Task, data: Examples, model: Any, make: Any, *, active: bool) -> dict:
    """torch.optim on full tensors with gradients of 0 outside a part; ``active`` puts back what it left out."""
    weights = {n: v.clone().requires_grad_() for n, v in task.patch.values.items()}
    optimiser = make(list(weights.values()))
    for step, (inputs, labels) in enumerate(batches_of(task, data, method.local)):
        units = list(method.parts[step % len(method.parts)])
        optimiser.zero_grad()
        hidden = torch.relu(inputs @ weights["0.weight"][units].T + weights["0.bias"][units])
        cross_entropy(hidden @ weights["2.weight"][:, units].T + weights["2.bias"], labels).backward()
        before = {n: v.detach().clone() for n, v in weights.items()}
        known = copy.deepcopy([optimiser.state[v] for v in weights.values()])
        optimiser.step()
        if not active:
            continue
        for (name, value), kept in zip(weights.items(), known, strict=True):
            moved = torch.zeros_like(value, dtype=torch.bool)
            moved[{"0.weight": units, "0.bias": units, "2.weight": (slice(None), units)}.get(name, ...)] = (
                True
            )
            value.data = torch.where(moved, value.data, before[name])
            for key, state in optimiser.state[value].items():
                if state.shape == value.shape:
                    rest = kept.get(key, torch.zeros_like(state))
                    optimiser.state[value][key] = torch.where(moved, state, rest)
    return {n: v.detach() for n, v in weights.items()}


@pytest.mark.parametrize("kind", [Nested, NestedActive])
@pytest.mark.parametrize("optimiser", ["adamw", "rmsprop"])
def test_moments_of_a_part_follow_the_inactive_policy(kind, optimiser):
    local = CASES[optimiser][0]
    local = replace(local, options={}, clip_norm=float("inf"), momentum=0.0)
    model, data = mlp_model(HIDDEN), vectors(10)
    task, method = task_for(model), kind(local=local, parts=PARTS)
    patch, _ = training.train(method, task, data, model)
    make = {
        "adamw": lambda each: torch.optim.AdamW(each, 0.01, weight_decay=0.1),
        "rmsprop": lambda each: torch.optim.RMSprop(each, 0.01, weight_decay=0.1),
    }[optimiser]
    expected = by_hand(method, task, data, model, make, active=kind is NestedActive)
    for name, value in expected.items():
        torch.testing.assert_close(patch.values[name], value, rtol=1e-5, atol=1e-6)


def test_coordinates_outside_a_part_rest_bit_for_bit_under_the_active_policy_alone():
    model, data = mlp_model(HIDDEN), vectors(10)
    task = task_for(model)
    for kind, rests in ((NestedActive, True), (Nested, False)):
        patch, _ = training.train(kind(local=ADAMW, parts=((0, 1), (1, 3))), task, data, model)
        outside, inside = [2, 4, 5, 6, 7], [0, 1, 3]
        start, now = task.patch.values["0.weight"], patch.values["0.weight"]
        assert (bits(now[outside]) == bits(start[outside])) == rests
        assert bits(now[inside]) != bits(start[inside])


def test_state_of_another_shape_is_refused_where_parts_are_moved_alone():
    local = LocalTraining(optimiser="torch.optim:Adafactor", lr=0.01)
    with pytest.raises(FedtailorError, match=r"training.optimiser = 'torch.optim:Adafactor': .* expected"):
        NestedActive(local=local)
    model = mlp_model()
    patch, _ = training.train(FedAvg(local), task_for(model), vectors(8), model)
    assert all(bool(value.isfinite().all()) for value in patch.values.values())


# Accumulation


def test_parts_of_a_batch_are_nearly_equal_and_all_of_it():
    batch = vectors(10).take(torch.arange(10))
    for count, least, sizes in ((4, 1, [3, 3, 2, 2]), (4, 3, [4, 3, 3]), (1, 1, [10]), (99, 2, [2] * 5)):
        parts = list(parts_of(batch, count, least))
        assert [len(labels) for (_, labels), _ in parts] == sizes
        assert [share for _, share in parts] == [size / 10 for size in sizes]
        assert torch.equal(torch.cat([inputs for (inputs, _), _ in parts]), batch[0])


@pytest.mark.parametrize("local", [LocalTraining(batch_size=8, momentum=0.9, epochs=3), ADAMW])
def test_accumulated_gradients_are_those_of_the_whole_batch(local):
    model, data, task = mlp_model(), vectors(21), task_for(mlp_model())
    whole, loss = training.train(Method(local), task, data, model)
    parts, same = training.train(Method(replace(local, accumulate=3)), task, data, model)
    assert same["loss"] == pytest.approx(loss["loss"], rel=1e-5)
    for name, value in whole.values.items():
        torch.testing.assert_close(parts.values[name], value, rtol=1e-3, atol=1e-5)
    assert differing(whole.values, parts.values) != set()


def test_halves_of_exact_numbers_give_exactly_the_whole():
    """Linear layers, squared error, small whole numbers: sums have no rounding in any order."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, -2.0], [2.0, 1.0]]))
        module[1].weight.copy_(torch.tensor([[1.0, -1.0]]))
    inputs = torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    data = Examples.of(inputs, torch.tensor([[1.0], [0.0], [2.0], [1.0]]))
    model = elastic(module, data.take(torch.arange(2)))
    model.objective = replace(
        model.objective, loss=lambda output, batch: (output - batch[-1]).square().mean()
    )
    local = LocalTraining(lr=0.5, batch_size=4)
    whole, _ = training.train(Method(local), task_for(model), data, model)
    halves, _ = training.train(Method(replace(local, accumulate=2)), task_for(model), data, model)
    assert differing(whole.values, halves.values) == set()
    assert differing(whole.values, module.state_dict()) == set(whole.values)


def test_parts_of_one_example_do_not_reach_batch_norm():
    model = cnn_model()
    local = LocalTraining(batch_size=5, accumulate=4)
    _, metrics = training.train(Method(local), task_for(model), images(10), model)
    assert metrics["examples"] == 10


# Numbers that are computed with


def test_bfloat16_computes_in_it_and_keeps_float32_weights():
    model, data, task = mlp_model(), vectors(8), task_for(mlp_model())
    seen: list[torch.dtype] = []

    @dataclass(frozen=True)
    class Watching(Method):
        def forward(self, *given: Any) -> Tensor:
            output = super().forward(*given)
            seen.append(output.dtype)
            return output

    full, _ = training.train(Watching(), task, data, model)
    half, _ = training.train(Watching(LocalTraining(precision="bfloat16")), task, data, model)
    assert seen == [torch.float32, torch.bfloat16]
    assert {value.dtype for value in half.values.values()} == {torch.float32}
    for name, value in full.values.items():
        torch.testing.assert_close(half.values[name], value, rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    ("known", "gains"), [({"avx512_bf16": True}, True), ({"avx2": True}, False), ({}, False)]
)
def test_auto_asks_the_processor_for_instructions(monkeypatch, known, gains):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    cpu = torch.device("cpu")
    assert precision.gains(cpu) == gains
    assert isinstance(precision.autocast("auto", cpu), torch.autocast) == gains
    assert not precision.gains(torch.device("mps"))


# Rates


def test_warm_up_over_rounds():
    local = LocalTraining(lr=0.8, warmup=4)
    assert [local.rate(round) for round in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    by_step = replace(local, warmup=0.5, schedule_every="step")
    assert [by_step.rate(0, step, 4) for step in range(4)] == pytest.approx([0.4, 0.8, 0.8, 0.8])
    assert by_step.rate(1, 0, 4) == 0.8


def test_warm_up_in_every_round_and_schedules_by_step():
    local = LocalTraining(lr=0.8, warmup_steps=2)
    assert [local.rate(7, step, 5) for step in range(3)] == pytest.approx([0.4, 0.8, 0.8])
    cosine = LocalTraining(lr=1.0, schedule="cosine", schedule_every="step", rounds=2)
    assert [cosine.rate(1, step, 2) for step in range(2)] == pytest.approx([0.5, 0.1464466])
    assert replace(cosine, schedule_every="round").rate(1, 1, 2) == 0.5
    falling = LocalTraining(lr=1.0, schedule="exponential", gamma=0.25, schedule_every="step")
    assert falling.rate(1, 1, 2) == pytest.approx(0.125)


def test_the_rate_of_each_step_is_the_one_that_moves_the_weights():
    local = LocalTraining(lr=0.5, warmup_steps=3, batch_size=4, epochs=2)
    model, data = mlp_model(), vectors(8)
    task, module = task_for(model), copy.deepcopy(model.module)
    patch, _ = training.train(Method(local), task, data, model)
    optimiser = torch.optim.SGD(module.parameters(), 0.5)
    climbs = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 3))
    for inputs, labels in batches_of(task, data, local):
        optimiser.zero_grad()
        cross_entropy(module(inputs), labels).backward()
        optimiser.step()
        climbs.step()
    assert differing(patch.values, module.state_dict()) == set()


# What it costs


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 0),
        ({"momentum": 0.9}, 1),
        ({"optimiser": "adamw"}, 2),
        ({"optimiser": "adam", "options": {"amsgrad": True}}, 3),
        ({"optimiser": "torch.optim:RMSprop"}, 1),
        ({"optimiser": "torch.optim:RMSprop", "momentum": 0.9}, 2),
    ],
)
def test_what_an_optimiser_keeps_is_counted(settings, slots):
    assert FedAvg(LocalTraining(**settings)).workload == Workload(32, slots)


def test_memory_budgets_count_state_and_parts():
    model = cnn_model(32, 64)
    budget = Budget(memory=model.costs.measure("memory", model.costs.full, Workload(32)))

    def share(**settings: Any) -> float:
        cut = model.fit(budget, workload=FedAvg(LocalTraining(**settings)).workload)
        return float(cut.share(model.groups))

    assert share() == 1
    assert share(optimiser="adamw") < 1
    assert share(optimiser="adamw", accumulate=8) == 1


# What is wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimiser": "adamv"}, "unknown training.optimiser 'adamv': did you mean 'adam'? Known: adam, adamw, sgd"),
        ({"optimiser": "torch.optim:Adamm"}, "training.optimiser 'torch.optim:Adamm': module 'torch.optim'"),
        ({"optimiser": "torch.nn:Linear"}, "training.optimiser = 'torch.nn:Linear': expected a class of torch.optim"),
        ({"optimiser": "torch.optim:LBFGS"}, "training.optimiser = 'torch.optim:LBFGS' with lr = 0.1: expected"),
        ({"optimiser": "torch.optim:SparseAdam"}, "training.optimiser = 'torch.optim:SparseAdam' with"),
        ({"optimiser": "adam", "options": {"beta": 0.9}}, "unknown option of Adam in [training.options] 'beta'"),
        ({"optimiser": "adam", "options": {"betas": [0.9, 1.5]}}, "training.optimiser = 'adam' with betas = (0.9"),
        ({"optimiser": "adam", "options": {"lr": 0.1}}, "training.options.lr = 0.1: expected it as training.lr"),
        ({"optimiser": "adam", "momentum": 0.9}, "training.momentum = 0.9: expected 0 with adam, which has no such"),
        ({"options": {"dampening": 0.1}}, "training.options = {'dampening': 0.1}: expected none with optimiser"),
        ({"decayed": "norms"}, "training.decayed = 'norms': expected one of all, matrices"),
        ({"precision": "half"}, "training.precision = 'half': expected one of float32, bfloat16, auto"),
        ({"schedule_every": "epoch"}, "training.schedule_every = 'epoch': expected one of round, step"),
        ({"accumulate": 0}, "training.accumulate = 0: expected 1 to 32, the batch_size"),
        ({"accumulate": 64}, "training.accumulate = 64: expected 1 to 32, the batch_size"),
        ({"warmup": -1}, "training.warmup = -1: expected a number of rounds, at least 0"),
        ({"warmup_steps": -1}, "training.warmup_steps = -1: expected at least 0"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(FedtailorError) as caught:
        LocalTraining(**settings)
    assert str(caught.value).startswith(message)


def test_a_method_whose_steps_are_parts_takes_adamw():
    """FjORD with distillation: two networks in a step, of which the narrow one shares the wide one's gradients."""
    model, data = mlp_model(), vectors(12)
    method = FjORD(replace(ADAMW, warmup_steps=2), widths=("1/4", "1/2", "1"))
    patch, metrics = training.train(method, task_for(model), data, model)
    assert metrics["loss"] > 0
    assert all(bool(value.isfinite().all()) for value in patch.values.values())
