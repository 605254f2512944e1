"""Weights that stay in the shell for all steps of a client answer as weights that are put there for each call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.methods.fedavg import FedAvg
from helpers import cnn_model, images, snapshot, task_for


@pytest.fixture
def model():
    return cnn_model()


def held(model, width):
    cut = prefix(model.groups, as_width(width))
    return model.cut(model.weights(), cut).values, cut


def test_seated_weights_answer_as_others(model):
    weights, cut = held(model, "1/2")
    batch = images(4).raw
    expected = model.forward({n: v.clone() for n, v in weights.items()}, cut, batch, mode="train")
    with model.seated(weights, cut):
        assert torch.equal(model.forward(weights, cut, batch, mode="train"), expected)


def test_whatever_runs_in_between_leaves_them_in_their_place(model):
    """Another cut, another mode, other weights of the same cut, without statistics: each sets the shell otherwise."""
    weights, cut = held(model, "1/2")
    start, batch = {n: v.clone() for n, v in weights.items()}, images(4).raw
    others, wide = held(model, 1)
    plain = {n: v + 1 for n, v in start.items() if n not in model.statistics}
    expected = [model.forward(start, cut, batch, mode="train") for _ in range(5)]
    between = [
        lambda: None,
        lambda: model.forward(others, wide, batch),
        lambda: model.forward(weights, cut, batch),
        lambda: model.forward(plain, cut, batch, mode="train"),
        lambda: model.shell(wide),
    ]
    with model.seated(weights, cut):
        for once, answer in zip(between, expected, strict=True):
            once()
            assert torch.equal(model.forward(weights, cut, batch, mode="train"), answer)
    assert snapshot(weights) == snapshot(start)  # running statistics too: five training steps on both sides


def test_outputs_are_multiplied_by_the_factors_of_each_call(model):
    """Also where the last call had others or none, was of another network, or replaced a computation too."""
    weights, cut = held(model, "1/2")
    others, batch = {n: v.clone() for n, v in weights.items()}, images(4).raw
    first, last = next(iter(model.groups.producers)), next(reversed(model.groups.producers))
    twice, thrice = {first: 2.0}, {first: 3.0, last: 0.5}
    doubled = {last: lambda x: 2 * x}
    asked = [
        (twice, None),
        (twice, None),
        (thrice, None),
        (None, None),
        (thrice, doubled),
        ({}, None),
        (twice, None),
    ]

    def answers(values, **more):
        return [model.forward(values, cut, batch, scale=s, replace=r, **more) for s, r in asked]

    expected = answers(others, mode="train")
    assert len({answer.sum().item() for answer in expected}) == 4
    with model.seated(weights, cut):
        assert all(map(torch.equal, answers(weights, mode="train"), expected))
        model.forward(weights, cut, batch, mode="train", scale=twice)
        copied = {n: v.clone() for n, v in weights.items()}
        plain = model.forward(copied, cut, batch)
        assert torch.equal(plain, model.forward(weights, cut, batch))
        assert torch.equal(model.forward(weights, cut, batch, mode="train", scale=twice), expected[0])
    assert torch.equal(model.forward(copied, cut, batch), plain)
    assert not any(layer._forward_hooks for layer in model.shell(cut).modules())


def test_factors_that_change_in_their_own_table_are_the_new_ones(model):
    weights, cut = held(model, "1/2")
    batch, first = images(4).raw, next(iter(model.groups.producers))
    own = {n: v.clone() for n, v in weights.items()}
    table = {first: 1.0}
    with model.seated(weights, cut):
        for factor in (1.5, 2.5, 2.5):
            table[first] = factor
            expected = model.forward(own, cut, batch, mode="train", scale={first: factor})
            assert torch.equal(model.forward(weights, cut, batch, mode="train", scale=table), expected)


def test_training_inside_training_leaves_both_in_their_places(model):
    weights, cut = held(model, "1/2")
    others, wide = held(model, 1)
    batch, first = images(4).raw, next(iter(model.groups.producers))
    copies = [{n: v.clone() for n, v in each.items()} for each in (weights, others)]
    expected = [model.forward(copies[0], cut, batch, mode="train", scale={first: 2.0}) for _ in range(2)]
    inner = model.forward(copies[1], wide, batch, mode="train")
    with model.seated(weights, cut):
        assert torch.equal(model.forward(weights, cut, batch, mode="train", scale={first: 2.0}), expected[0])
        with model.seated(others, wide):
            assert torch.equal(model.forward(others, wide, batch, mode="train"), inner)
        assert torch.equal(model.forward(weights, cut, batch, mode="train", scale={first: 2.0}), expected[1])
    assert not any(layer._forward_hooks for layer in model.shell(cut).modules())


def test_nobody_copies_a_model_that_holds_a_clients_weights(model):
    weights, cut = held(model, "1/2")
    with model.seated(weights, cut), pytest.raises(FedtailorError, match="expected a copy before or after"):
        copy.deepcopy(model)
    assert copy.deepcopy(model).groups == model.groups


def test_after_the_block_the_shell_is_without_weights(model):
    weights, cut = held(model, 1)
    with pytest.raises(RuntimeError, match="Expected"), model.seated(weights, cut):
        model.forward(weights, cut, (torch.zeros(1, 9), torch.zeros(1)), mode="train")
    assert all(value.is_meta for value in model.shell(cut).parameters())
    assert all(value.is_meta for value in model.shell(cut).buffers() if value.dim())


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return self.body(x) * self.seen


def test_what_a_module_puts_in_the_place_of_its_buffer_lasts_for_one_call():
    torch.manual_seed(0)
    model = elastic(Counting(), (torch.randn(2, 5), torch.tensor([0, 1])))
    weights, cut = held(model, 1)
    batch = torch.randn(3, 5), torch.tensor([0, 1, 2])
    expected = model.forward({n: v.clone() for n, v in weights.items()}, cut, batch, mode="train")
    with model.seated(weights, cut):
        for _ in range(3):
            assert torch.equal(model.forward(weights, cut, batch, mode="train"), expected)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.01}, {"momentum": 0.5}, {"proximal": 0.1}])
def test_steps_are_those_of_weights_that_are_put_there_each_time(model, settings):
    """Plain SGD on all that is held has a way of its own through a step."""
    method, task = FedAvg(LocalTraining(lr=0.5, **settings)), task_for(model)
    seated, apart = LocalSteps(method, task, model), LocalSteps(method, task, model)
    apart.own = dict(apart.own)
    apart.optimiser.unwatched = []
    with model.seated(seated.own, seated.cut):
        for step in range(3):
            assert seated.take(step, images(4, seed=step).raw) == apart.take(step, images(4, seed=step).raw)
    assert snapshot(seated.trained().values) == snapshot(apart.trained().values)
