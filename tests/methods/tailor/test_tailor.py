"""tailor: FjORD where all its parts are off, FedAvg where there is one width; and what each part does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any

import pytest
import torch

import fedtailor
from fedtailor.client.local_training import LocalTraining
from fedtailor.config import make_config
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.merging.settings import ServerSettings
from fedtailor.messages import Client, Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.methods.tailor.tailor import Tailor
from fedtailor.objective import distillation_loss
from fedtailor.run.arguments import method_with
from fedtailor.seeds import Seeds
from helpers import bits, client, cnn_model, differing, image_data, mlp_model, run, update_of, vectors

LOCAL = LocalTraining(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)
STILL = ServerSettings()
OFF: dict[str, Any] = {
    "server": STILL, "widths": "uniform-5", "smallest_share": 0.0, "sandwich": False, "compute": inf, "ahead": False,
    "few_holders": 0.0, "joint_mean": "networks", "distillation": True, "alpha": 1.0,
}  # fmt: skip


def task_of(method: FjORD, model: ElasticModel, who: Client) -> Task:
    return method.assign(method.init(model), who, model, Seeds(0))


def steps_of(method: FjORD, model: ElasticModel, budget: Budget, steps: int = 400) -> list[tuple[str, ...]]:
    task = task_of(method, model, replace(client(0, 1, examples=40), budget=budget))
    return [tuple(cut.tag for cut in method.step_cuts(task, step, model)) for step in range(steps)]


# What must be exact


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.5}, {"distillation": False}])
def test_with_all_parts_off_it_is_fjord_bit_for_bit(settings):
    model, data = cnn_model(10, 15), image_data((8, 6, 7, 5, 9))
    ours, theirs = (
        run(method, model, data, "uniform-5", rounds=3)
        for method in (Tailor(LOCAL, **(OFF | settings)), FjORD(LOCAL, **settings))
    )
    assert differing(ours.state.weights, theirs.state.weights) == set()
    assert [record.training for record in ours.records] == [record.training for record in theirs.records]


PARTS = {
    "smallest_share": 0.3, "sandwich": True, "compute": 1.0, "ahead": True, "few_holders": 0.5,
    "joint_mean": "holders", "server": ServerSettings(momentum=0.5),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone_changes_the_result(part):
    model, data = cnn_model(10, 15), image_data((8, 6, 7, 5, 9))
    alone = {**OFF, part: PARTS[part]}
    ours = run(Tailor(LOCAL, **alone), model, data, "uniform-5", rounds=3).state.weights
    theirs = run(FjORD(LOCAL), model, data, "uniform-5", rounds=3).state.weights
    assert differing(ours, theirs) & model.trainable


def test_one_tier_of_full_devices_is_fedavg_bit_for_bit():
    model, data = cnn_model(), image_data((6, 9, 4))
    settled = Tailor(LOCAL, server=STILL).for_fleet([Budget(width=1)], model)
    assert settled.candidates == (1,)
    ours = run(settled, model, data, rounds=3).state.weights
    theirs = run(FedAvg(LOCAL), model, data, rounds=3).state.weights
    assert not differing({n: ours[n] for n in model.trainable}, {n: theirs[n] for n in model.trainable})
    assert all(bits(ours[f"{name}@1"]) == bits(theirs[name]) for name in model.statistics)


# The fleet's own widths


def test_widths_are_those_that_the_tiers_can_run():
    model = cnn_model(40, 60)
    budgets = [Budget(width=Fraction(1, 3)), Budget(macs=0.25), Budget(width=1)]
    method = Tailor().for_fleet(budgets, model)
    small, middle, large = method.candidates
    assert (small, large) == (Fraction(1, 3), 1)
    macs = {
        width: model.cost(method.cut_at(width, model)).macs for width in (middle, middle + Fraction(1, 20))
    }
    allowed = model.cost(method.cut_at(large, model)).macs / 4
    assert macs[middle] <= allowed < macs[middle + Fraction(1, 20)]
    for budget, width in zip(budgets, (small, middle, large), strict=True):
        assert method.cut_for(method.init(model), budget, model).width == width
    assert method.for_fleet([Budget(width=1)], model) is method  # settled once
    assert Tailor(widths="uniform-5").for_fleet(budgets, model).candidates == FjORD().candidates


def test_a_run_settles_them_before_it_starts():
    data = {"dataset": "digits", "clients": 4, "limit": 80}
    run = fedtailor.train("mlp", data, "a1-c1", "tailor", rounds=1, engine={"workers": 0}, progress=False)
    assert isinstance(run.method, Tailor)
    assert run.method.candidates == (Fraction(1, 4), Fraction(1))


# What steps are spent on


def test_the_smallest_width_is_drawn_at_least_so_often_and_the_others_alike():
    method = Tailor(**{**OFF, "smallest_share": 0.5, "distillation": False})
    drawn = Counter(steps_of(method, mlp_model(10), Budget(width=1), 2000))
    assert abs(drawn["1/5",] - 1000) < 5 * (2000 / 4) ** 0.5
    for width in ("2/5", "3/5", "4/5", "1"):
        assert abs(drawn[width,] - 250) < 5 * (2000 * 7 / 64) ** 0.5
    assert set(steps_of(method, mlp_model(10), Budget(width=Fraction(1, 5)))) == {("1/5",)}


def test_a_sandwich_is_the_largest_the_drawn_and_the_smallest():
    drawn = set(steps_of(Tailor(**{**OFF, "sandwich": True}), mlp_model(10), Budget(width=Fraction(4, 5))))
    assert drawn == {("4/5", "1/5"), ("4/5", "2/5", "1/5"), ("4/5", "3/5", "1/5")}


@pytest.mark.parametrize("sandwich", [True, False])
@pytest.mark.parametrize("budget", [Budget(width=1), Budget(width=Fraction(3, 5)), Budget(macs=0.5)])
def test_a_mean_step_costs_what_the_budget_pays(sandwich, budget):
    """By the same count as for every other method: the record's multiply-accumulates of a long round."""
    model, method = mlp_model(40), Tailor(widths="uniform-5", sandwich=sandwich, distillation=True)
    task = task_of(method, model, replace(client(0, 1, examples=60000), budget=budget))
    largest, whole = model.cost(task.patch.cut).macs, model.cost(method.cut_at(Fraction(1), model)).macs
    paid = 3 * (whole / 2 if budget.macs is not None else largest)
    assert 0 < method.joint_share(task, model) < 1
    assert method.work(task, model).macs == pytest.approx(paid, rel=0.05)


def test_without_a_limit_every_step_is_joint_and_one_width_needs_none():
    model, method = mlp_model(10), Tailor(widths="uniform-5", compute=inf)
    assert all(len(step) >= 2 for step in steps_of(method, model, Budget(width=1)))
    assert set(steps_of(method, model, Budget(width=Fraction(1, 5)))) == {("1/5",)}


# Who teaches


def outputs_of(model: ElasticModel, confident: list[float]) -> tuple[list[torch.Tensor], Any]:
    """Networks' answers to one batch, each so sure of the right label."""
    batch = vectors(6).take(torch.arange(6))
    right = torch.nn.functional.one_hot(batch[-1], 4).float()
    return [(sure * right).requires_grad_() for sure in confident], batch


@pytest.mark.parametrize(
    ("confident", "teachers"),
    [
        ([3.0, 2.0, 1.0], {1: 0, 2: 0}),  # the largest is ahead of both
        (
            [1.0, 3.0, 2.0],
            {1: None, 2: 1},
        ),  # the middle one leads: labels for it, and it teaches the smallest
        ([1.0, 1.0, 1.0], {1: None, 2: None}),  # nobody is ahead
    ],
)
def test_the_largest_network_that_is_ahead_teaches_and_labels_do_where_there_is_none(confident, teachers):
    model, method = mlp_model(10), Tailor(widths="uniform-5", distillation=True, alpha=1.0)
    outputs, batch = outputs_of(model, confident)
    losses = [model.objective.loss(output, batch) for output in outputs]
    expected = losses[0]
    for student, teacher in teachers.items():
        taught = None if teacher is None else distillation_loss(outputs[student], outputs[teacher], 1.0)
        expected = expected + (losses[student] if taught is None else taught)
    found = method.loss(outputs, [], batch, task_of(method, model, client(0, 1)), model)
    assert torch.allclose(found, expected / 3)


def test_without_distillation_all_networks_of_a_step_learn_from_labels():
    model = mlp_model(10)
    outputs, batch = outputs_of(model, [3.0, 2.0, 1.0])
    method = Tailor(widths="uniform-5")
    found = method.loss(outputs, [], batch, task_of(method, model, client(0, 1)), model)
    assert torch.allclose(found, sum(model.objective.loss(output, batch) for output in outputs) / 3)


def test_both_labels_and_teacher_where_alpha_says_so():
    model = mlp_model(10)
    outputs, batch = outputs_of(model, [3.0, 1.0])
    method = Tailor(widths="uniform-5", distillation=True, alpha=0.25, ahead=False)
    large, small = (model.objective.loss(output, batch) for output in outputs)
    expected = (large + 0.25 * distillation_loss(outputs[1], outputs[0], 1.0) + 0.75 * small) / 2
    found = method.loss(outputs, [], batch, task_of(method, model, client(0, 1)), model)
    assert torch.allclose(found, expected)


# What the server makes of it


@pytest.mark.parametrize(("power", "factor"), [(1.0, 0.25), (0.5, 0.5)])
def test_coordinates_of_few_holders_are_slowed_and_what_everyone_holds_keeps_its_bits(power, factor):
    model, method = mlp_model(10), Tailor(widths="uniform-5", server=STILL, few_holders=power)
    state = method.init(model)
    updates = []
    for number, (width, examples) in enumerate([("1/5", 2), ("1/5", 4), ("1", 2)]):  # a quarter of the weight
        patch = method.assign(state, client(number, width), model, Seeds(0)).patch
        values = {name: value + 1 for name, value in patch.values.items()}
        updates.append(update_of(number, replace(patch, values=values), examples))
    ours = method.merge(state, updates, model).weights["0.weight"]
    plain = FjORD().merge(state, updates, model).weights["0.weight"]
    assert bits(ours[:2]) == bits(plain[:2])
    assert torch.allclose(ours[2:] - state.weights["0.weight"][2:], torch.full((8, 5), factor))


def test_the_order_of_answers_does_not_move_a_bit_of_slowed_coordinates():
    model, method = cnn_model(10, 15), Tailor(widths="uniform-5", few_holders=0.5)
    state, generator = method.init(model), torch.Generator().manual_seed(3)
    updates = []
    for number, width in enumerate(["1/5", "3/5", "1", "2/5"]):
        patch = method.assign(state, client(number, width), model, Seeds(0)).patch
        values = {n: v + torch.randn(v.shape, generator=generator) for n, v in patch.values.items()}
        updates.append(update_of(number, replace(patch, values=values), 0.1 * (number + 1)))
    one, other = (method.merge(state, each, model).weights for each in (updates, updates[::-1]))
    assert differing(one, other) == set()


def test_the_server_has_momentum_unless_the_config_says_otherwise():
    def server(**table: Any) -> ServerSettings:
        return make_config({"method": {"name": "tailor"}, "server": table}).built_method.server

    assert server() == ServerSettings(momentum=0.5)
    assert server(momentum=0) == ServerSettings()
    assert server(optimiser="yogi") == ServerSettings("yogi")  # without the momentum of another
    given = method_with(Tailor(), None, 3, {"optimiser": "adam"})
    assert given.server == ServerSettings("adam")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"smallest_share": 1.0}, r"method.smallest_share = 1.0: expected at least 0 and below 1"),
        ({"compute": 0.5}, r"method.compute = 0.5: expected at least 1"),
        ({"joint_mean": "all"}, r"unknown method.joint_mean 'all'; known: holders, networks"),
        ({"few_holders": -1}, r"method.few_holders = -1: expected a number from 0 to 1"),
        ({"random_drop": 0.25}, r"method.random_drop = 0.25: expected nothing with tailor"),
        ({"probabilities": (0.2,) * 5}, r'expected none with method.widths = "fleet"'),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(settings, words):
    with pytest.raises(FedtailorError, match=words):
        Tailor(**settings)
