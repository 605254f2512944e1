"""Server optimisers against torch.optim and their papers; what nobody sent rests; averages over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from own_merges import Forgetful, OwnMerge
from torch import Tensor

import fedtailor
from fedtailor.client.evaluate import evaluate_patches
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.errors import FedtailorError
from fedtailor.merging import holder_mean
from fedtailor.merging.optimising import optimised, to_deploy
from fedtailor.merging.settings import ServerSettings
from fedtailor.messages import ServerState, Update
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.heterofl import HeteroFL
from helpers import bits, cnn_model, differing, held_mask, image_data, mlp_model, run, tiny_mlp, update_of

NAME = "0.weight"
ADAM = ServerSettings(optimiser="adam", lr=0.05, betas=(0.9, 0.99), eps=1e-3)
ACTIVE = {
    "momentum": ServerSettings(momentum=0.9, lr=0.7),
    "adagrad": ServerSettings(optimiser="adagrad", lr=0.2),
    "adam": ADAM,
    "yogi": ServerSettings(optimiser="yogi", lr=0.05),
}
ROUNDS = 4


def full_updates(model, round: int) -> list[Update]:
    """Two clients of other weights, both of full width."""
    generator = torch.Generator().manual_seed(round)
    values = [
        {n: v + 0.1 * torch.randn(v.shape, generator=generator) for n, v in model.weights().items()}
        for _ in range(2)
    ]
    return [update_of(i, Patch(each, Cut.everything()), 1.0 + i) for i, each in enumerate(values)]


def by_torch(settings: ServerSettings, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if settings.optimiser == "adam":
        return torch.optim.Adam(parameters, lr=settings.rate, betas=settings.betas, eps=settings.eps)
    if settings.optimiser == "adagrad":
        return torch.optim.Adagrad(parameters, lr=settings.rate, eps=settings.eps)
    return torch.optim.SGD(parameters, lr=settings.rate, momentum=settings.momentum)


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam"])
def test_with_everybody_at_full_width_it_is_torch_optim_on_the_pseudo_gradient(name):
    model, method = mlp_model(), FedAvg(server=ACTIVE[name])
    state = method.init(model)
    theirs = {n: v.clone().requires_grad_() for n, v in state.weights.items()}
    optimiser = by_torch(ACTIVE[name], list(theirs.values()))
    for round in range(ROUNDS):
        updates = full_updates(model, round)
        mean = holder_mean(state.weights, updates, model)
        for key, weight in theirs.items():
            weight.grad = weight.detach() - mean[key]
        optimiser.step()
        state = method.merge(state, updates, model)
        assert differing(state.weights, theirs) == set()
    assert differing(state.weights, mean) == set(theirs)


def test_yogi_is_the_papers_formula():
    """Reddi et al. 2021, algorithm 2; D is the merged difference."""
    settings = ServerSettings(optimiser="yogi", lr=0.3, betas=(0.8, 0.95), eps=0.01)
    model, method = mlp_model(), FedAvg(server=settings)
    state = method.init(model)
    x = state.weights[NAME].double()
    m, v = torch.zeros_like(x), torch.full_like(x, 0.01**2)
    for round in range(ROUNDS):
        updates = full_updates(model, round)
        difference = holder_mean(state.weights, updates, model)[NAME].double() - state.weights[NAME].double()
        m = 0.8 * m + 0.2 * difference
        v = v - 0.05 * difference**2 * torch.sign(v - difference**2)
        x = x + 0.3 * m / (v.sqrt() + 0.01)
        state = method.merge(state, updates, model)
        torch.testing.assert_close(state.weights[NAME].double(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_coordinate_is_optimised_as_if_rounds_without_it_had_not_been(name):
    """Random coverage, coordinate by coordinate: each must equal a lone tensor that only saw its own rounds."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(4, 5, generator=generator)
    sent = [torch.rand(4, 5, generator=generator) < 0.5 for _ in range(6)]
    moves = [0.1 * torch.randn(4, 5, generator=generator) for _ in range(6)]
    settings = ACTIVE[name]

    weights, moments = old, {}
    for mask, move in zip(sent, moves, strict=True):
        before, kept = weights, moments
        weights, moments = optimised(settings, before, torch.where(mask, before + move, before), mask, kept)
        assert bits(weights[~mask]) == bits(before[~mask])
        for kind, value in kept.items():
            assert bits(moments[kind][~mask]) == bits(value[~mask])
    for place in ((0, 0), (1, 3), (3, 4)):
        alone, known = old[place].reshape(1), {}
        for mask, move in zip(sent, moves, strict=True):
            if mask[place]:
                target = alone + move[place]
                alone, known = optimised(settings, alone, target, torch.tensor([True]), known)
        assert bits(alone[0]) == bits(weights[place])


def test_a_coordinate_that_was_sent_back_as_it_was_is_no_coordinate_that_nobody_sent():
    """Momentum goes on where the difference is zero, and rests where there is none."""
    settings = ServerSettings(momentum=0.9)
    old, everywhere = torch.zeros(2), torch.tensor([True, True])
    weights, moments = optimised(settings, old, torch.ones(2), everywhere, {})
    weights, _ = optimised(settings, weights, weights.clone(), torch.tensor([True, False]), moments)
    assert weights[0] > 1
    assert weights[1] == 1


@pytest.mark.parametrize("name", ACTIVE)
def test_what_lies_outside_all_cuts_keeps_value_and_moments(name):
    model, method = mlp_model(), HeteroFL(server=ACTIVE[name])
    narrow = prefix(model.groups, as_width("1/2"))
    state = method.merge(method.init(model), full_updates(model, 0), model)
    moved = {n: v + 1 for n, v in model.cut(state.weights, narrow).values.items()}
    after = method.merge(state, [update_of(0, Patch(moved, narrow))], model)
    for key in ("0.weight", "0.bias", "2.weight"):
        outside = ~held_mask(model, narrow, key)
        assert outside.any()
        assert bits(after.weights[key][outside]) == bits(state.weights[key][outside])
        for kind in state.moments.keys() - {"round"}:
            before, now = state.moments[kind][key], after.moments[kind][key]
            assert bits(now[outside]) == bits(before[outside])
            assert bits(now[~outside]) != bits(before[~outside])


@pytest.mark.parametrize("kind", [FedAvg, HeteroFL])
def test_without_momentum_and_at_rate_one_nothing_changes_bit_for_bit(kind):
    model, data = cnn_model(), image_data((6, 5, 7, 4))
    local = LocalTraining(batch_size=4)
    plain = run(kind(local), model, data, "uniform-2", rounds=2).state
    named = run(
        kind(local, server=ServerSettings(lr=1.0, momentum=0.0)), model, data, "uniform-2", rounds=2
    ).state
    assert differing(plain.weights, named.weights) == set()
    assert plain.moments == named.moments == {}


def test_statistics_and_whole_numbers_are_the_merged_mean():
    model = cnn_model()
    method = FedAvg(server=ADAM)
    updates = full_updates(model, 0)
    whole = {n: v for n, v in model.weights().items() if not v.is_floating_point()}
    for update in updates:
        update.patch.values.update({n: v + 3 for n, v in whole.items()})
    merged = holder_mean(model.weights(), updates, model)
    after = method.merge(method.init(model), updates, model).weights
    rest = {*whole, *model.statistics}
    assert whole
    assert differing(after, merged) == set(after) - rest


def test_half_numbers_keep_moments_that_are_wide():
    old = torch.ones(3, dtype=torch.bfloat16)
    weights, moments = optimised(ADAM, old, old + 0.5, torch.ones(3, dtype=torch.bool), {})
    assert weights.dtype == torch.bfloat16
    assert moments["second"].dtype == torch.float32


# Averages over rounds


def test_the_average_is_what_is_evaluated_deployed_and_saved(tmp_path):
    data = image_data((6, 5, 7, 4))
    model = cnn_model()
    method = HeteroFL(
        LocalTraining(batch_size=4, lr=0.5), norm="averaged", server=ServerSettings(average=0.9)
    )
    states: list[ServerState] = []

    @dataclass(frozen=True)
    class Watched(HeteroFL):
        def merge(self, state: Any, updates: Sequence[Update], model: Any) -> ServerState:
            states.append(super().merge(state, updates, model))
            return states[-1]

    watched = Watched(method.local, norm="averaged", server=method.server)
    result = fedtailor.train(
        model.module, data, "uniform-2", watched, rounds=3, clients_per_round=3, evaluate_every=3,
        engine={"workers": 0}, folder=tmp_path / "run",
    )  # fmt: skip
    expected = {n: v for n, v in states[0].weights.items() if v.is_floating_point()}
    start = result.setup.start.state.weights
    expected = {n: torch.lerp(start[n], v, 1 - 1 / 10) for n, v in expected.items()}
    for n, state in enumerate(states[1:], 1):
        stays = min(0.9, (1 + n) / (10 + n))
        expected = {name: torch.lerp(v, state.weights[name], 1 - stays) for name, v in expected.items()}
    ours = {name: result.state.weights[name] for name in expected}
    assert differing(ours, expected) == set()
    raw = {name: states[-1].weights[name] for name in expected}
    assert differing(ours, raw) >= {"0.weight", "1.running_mean", "8.weight"}
    loaded = fedtailor.Run.load(tmp_path / "run", model.module, data, method=watched)
    assert differing(loaded.state.weights, result.state.weights) == set()
    patches = loaded.deploy(Budget(width=1)).patches
    assert evaluate_patches(model, patches, data.test) == result.tiers["1"]


def test_norms_are_measured_on_the_average_and_training_goes_on_from_the_weights():
    model, data = cnn_model(), image_data((6, 5, 7, 4))
    local = LocalTraining(batch_size=4, lr=0.5)
    averaged = run(
        HeteroFL(local, server=ServerSettings(average=0.9)), model, data, "uniform-2", rounds=3, every=1
    ).state
    plain = run(HeteroFL(local), model, data, "uniform-2", rounds=3, every=1).state
    trained = model.trainable
    assert differing(*({n: s.weights[n] for n in trained} for s in (averaged, plain))) == set()
    statistics = [name for name in plain.weights if "@" in name]
    assert statistics
    assert any(bits(averaged.weights[n]) != bits(plain.weights[n]) for n in statistics)


def test_a_coordinate_that_nobody_ever_sent_is_its_own_average():
    model, method = mlp_model(), HeteroFL(server=ServerSettings(average=0.99))
    narrow = prefix(model.groups, as_width("1/2"))
    state = start = method.init(model)
    for _ in range(3):
        moved = {n: v + 1 for n, v in model.cut(state.weights, narrow).values.items()}
        state = method.merge(state, [update_of(0, Patch(moved, narrow))], model)
    outside = ~held_mask(model, narrow, NAME)
    shown = to_deploy(state).weights[NAME]
    assert bits(shown[outside]) == bits(start.weights[NAME][outside])
    assert bool((shown != state.weights[NAME])[~outside].all())


# Who may, and what is wrong


def test_methods_that_merge_in_their_own_way_are_refused():
    OwnMerge()
    with pytest.raises(
        FedtailorError, match=r"server.optimiser = 'adam'.*: OwnMerge merges in its own way.*expected"
    ):
        OwnMerge(server=ADAM)
    with pytest.raises(FedtailorError, match=r"server.average = 0.9: OwnMerge merges"):
        OwnMerge(server=ServerSettings(average=0.9))
    method = Forgetful(LocalTraining(batch_size=4), server=ADAM)
    with pytest.raises(FedtailorError, match="Forgetful.merge did not call the shared merge"):
        run(method, cnn_model(), image_data((6, 5)), rounds=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimiser": "adm"}, "unknown server.optimiser 'adm': did you mean 'adam'?"),
        ({"lr": 0.0}, "server.lr = 0.0: expected a number above 0"),
        ({"momentum": 1.0}, "server.momentum = 1.0: expected at least 0 and below 1"),
        ({"betas": (0.9, 1.0), "optimiser": "adam"}, "server.betas = (0.9, 1.0): expected two numbers"),
        ({"eps": 0.0, "optimiser": "yogi"}, "server.eps = 0.0: expected a number above 0"),
        ({"average": 1.0}, "server.average = 1.0: expected at least 0 and below 1"),
        ({"optimiser": "adam", "momentum": 0.9}, "server.momentum = 0.9: expected 0.0 with server.optimiser = 'adam'"),
        ({"betas": (0.5, 0.5)}, "server.betas = (0.5, 0.5): expected (0.9, 0.99) with server.optimiser = 'sgd'"),
        ({"eps": 1.0}, "server.eps = 1.0: expected 0.001 with server.optimiser = 'sgd'"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(FedtailorError) as caught:
        ServerSettings(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("given", [{"optimizer": "adam"}, {"lr": "fast"}, 3])
def test_wrong_tables_are_refused_from_python_too(given):
    with pytest.raises(FedtailorError, match="server"):
        fedtailor.train(tiny_mlp(), "digits", server=given)
