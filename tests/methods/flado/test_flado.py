"""Flado: probabilities at their budget, what travels, what stays, and what it becomes at the ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.client import training
from fedtailor.client.local_steps import Diverged
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.expected import expected_macs, project, uniform_probability
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.messages import ServerState
from fedtailor.methods.dropping import draw_active
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.flado.flado import Flado
from fedtailor.methods.flado.sketch import Transform
from fedtailor.methods.flado.trajectory import SEED, SKETCH, trajectory_of
from fedtailor.methods.uniprob import UniProb
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, differing, image_data, images, mlp_model, run, update_of, vectors
from methods.test_uniprob import SquareStage

LOCAL = LocalTraining(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)
SMALL = Fleet((Tier("small", Budget(macs=0.3), 1),))


def square_model():
    return elastic(SquareStage(), image_data().example())


def some_probabilities(model, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 1, size=model.units.total)


def cost(model, probabilities) -> float:
    return expected_macs(model.costs, model.units.by_group(probabilities)) / model.cost(Cut.everything()).macs


@pytest.mark.parametrize("build", [lambda: cnn_model(8, 12), square_model])
def test_mean_cost_of_drawn_networks_is_the_expected_cost(build):
    """Monte Carlo within 1 %, a probability of its own for every unit."""
    model, generator = build(), np.random.default_rng(1)
    probabilities = some_probabilities(model)
    draws = np.array(
        [
            model.costs.counts(draw_active(model.groups, model.units.by_group(probabilities), generator))
            for _ in range(8000)
        ]
    )
    mean = np.mean([model.costs.curve("macs").at(counts) for counts in draws]) / 2  # the example holds two
    assert cost(model, probabilities) * model.cost(Cut.everything()).macs == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize("build", [lambda: cnn_model(16, 24), square_model])
@pytest.mark.parametrize("share", [0.1, 0.34, 0.64, 0.95])
def test_projected_probabilities_cost_exactly_the_budget(build, share):
    model = build()
    budget = Budget(macs=share)
    projected = project(model.costs, some_probabilities(model), budget, 0.01)
    assert cost(model, projected) == pytest.approx(share, rel=1e-9)
    assert (projected >= 0.01).all()
    assert (projected <= 1).all()
    assert (
        project(model.costs, projected, budget, 0.01) is projected
    )  # a point at the boundary stays where it is


def test_the_uniform_start_is_a_point_at_the_boundary():
    model = square_model()
    start = np.full(model.units.total, uniform_probability(model.costs, Budget(macs=0.3)))
    assert np.abs(project(model.costs, start, Budget(macs=0.3)) - start).max() < 1e-12


def test_a_full_budget_is_fedavg_bit_for_bit_on_what_is_trained():
    model, data = cnn_model(), image_data((6, 9, 4))
    for norm in ("averaged", "static"):
        ours = run(Flado(LOCAL, norm), model, data, rounds=3).state.weights
        theirs = run(FedAvg(LOCAL, norm), model, data, rounds=3).state.weights
        assert not differing(ours, theirs) & set(model.trainable)


def test_without_alignment_steps_it_is_uniprob_bit_for_bit():
    model, data = cnn_model(8, 12), image_data((6, 9, 4))
    ours = run(Flado(LOCAL, alignment_share=0), model, data, SMALL, rounds=3)
    theirs = run(UniProb(LOCAL), model, data, SMALL, rounds=3)
    assert not differing(ours.state.weights, theirs.state.weights)
    assert [record.training for record in ours.records] == [record.training for record in theirs.records]


@pytest.mark.parametrize("estimator", ["update", "hessian", "score", "surrogate"])
def test_every_estimator_moves_probabilities_at_the_budget(estimator):
    model, data = cnn_model(8, 12), image_data((6, 9, 4))
    method = Flado(LOCAL, estimator=estimator, alignment_share=0.5, sketch=64)
    task, prepared = second_round(method, model, data)
    update = method.train(prepared, data.train.subset(torch.arange(6)), model)
    p = update.memory["probabilities"].numpy()
    assert cost(model, p) == pytest.approx(0.3, rel=1e-9)
    assert p.min() >= method.smallest_probability
    assert len(set(p.tolist())) > 1
    assert -1 <= update.metrics["cosine"] <= 1
    assert method.work(task, model).macs > UniProb(LOCAL).work(task, model).macs
    means = {name: value for name, value in update.metrics.items() if name.startswith("probability of")}
    assert means == method.means(prepared, model)  # those that it trained with, not the next ones


def second_round(method, model, data):
    """The task of client 0 after one round, and what it makes of it before it trains."""
    state = run(method, model, data, SMALL, rounds=1).state
    who = replace(client(0, examples=6), budget=Budget(macs=0.3))
    task = method.assign(state, who, model, Seeds(0))
    return task, method.prepare(task, data.train.subset(torch.arange(6)), model)


def test_only_k_numbers_and_a_seed_travel_and_the_client_uses_the_servers_transform():
    model, data = cnn_model(8, 12), image_data((6, 9, 4))
    method = Flado(LOCAL, sketch=64)
    first = method.assign(method.init(model), client(), model, Seeds(0))
    task, prepared = second_round(method, model, data)
    assert SKETCH not in first.patch.values  # nothing has moved yet
    assert task.patch.nbytes - first.patch.nbytes == 64 * 4 + 8
    assert SKETCH not in task.lease.names
    assert {SKETCH, SEED}.isdisjoint(prepared.patch.values)
    moved = run(method, model, data, SMALL, rounds=1).state.weights
    before = method.init(model).weights
    names = [name for name in model.parameters if name in model.trainable]
    received = trajectory_of(task.patch, model)
    again = received.transform([moved[name] - before[name] for name in names])
    assert torch.allclose(again, received.sketch, rtol=1e-4, atol=1e-6)
    assert isinstance(received.transform, Transform)


@pytest.mark.parametrize("estimator", ["surrogate", "update"])
def test_a_client_that_descends_along_the_trajectory_raises_the_channels_that_do(estimator):
    """The trajectory is the client's own descent on three of eight channels, as much on each; the sign decides."""
    model = mlp_model(hidden=8)
    data = vectors(24)
    method = Flado(
        LocalTraining(batch_size=24), estimator=estimator, alignment_share=1.0, alignment_step=0.05,
        persistence=0.9, sketch=4096,
    )  # fmt: skip
    weights = {name: value.requires_grad_() for name, value in model.weights().items()}
    batch = data.take(torch.arange(24))
    loss = model.objective.loss(model.forward(weights, Cut.everything(), batch, mode="train"), batch)
    gradient = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    after = {name: value.detach().clone() for name, value in weights.items()}
    steepness = gradient["0.weight"].square().sum(1) + gradient["0.bias"].square()
    after["0.weight"][:3] -= gradient["0.weight"][:3] / steepness[:3, None]
    after["0.bias"][:3] -= gradient["0.bias"][:3] / steepness[:3]
    before = ServerState(0, model.weights())
    updates = [update_of(0, Patch(after, Cut.everything()), weight=4.0)]
    state = method.merge(before, updates, model)
    who = replace(client(0, examples=24), budget=Budget(macs=0.4))
    task = method.assign(replace(state, weights=model.weights()), who, model, Seeds(0))
    for _ in range(20 if estimator == "update" else 1):  # a step sees the channels that it drew
        memory = method.perform(task, data, model).memory
        task = replace(task, memory=memory, round=task.round + 1)
    p = memory["probabilities"].numpy()
    assert p[:3].min() > np.median(p[3:])  # a channel without any gradient turns no step aside: it may stay
    assert p[:3].mean() > p[3:].mean() + (0.3 if estimator == "update" else 0.02)


def test_probabilities_stay_with_the_client_from_round_to_round():
    model, data = cnn_model(8, 12), image_data((6, 9, 4))
    method = Flado(LOCAL, sketch=64)
    rows = run(method, model, data, SMALL, rounds=5).records
    group = f"probability of {model.groups.elastic[0]}"
    means = [record.reported["0"][group] for record in rows]
    assert len(set(means)) == 4  # every round but the first, which has nothing to follow, ends elsewhere
    task, prepared = second_round(method, model, data)
    kept = {"probabilities": prepared.memory["probabilities"]}
    silent = replace(task, memory=kept, patch=prepared.patch)
    assert torch.equal(method.prepare(silent, None, model).memory["probabilities"], kept["probabilities"])
    tighter = replace(silent, client=replace(task.client, budget=Budget(macs=0.2)))
    p = method.prepare(tighter, None, model).memory["probabilities"].numpy()
    assert cost(model, p) == pytest.approx(0.2, rel=1e-9)


def test_divergence_resets_to_uniform_once_and_both_attempts_count(monkeypatch):
    model, data = cnn_model(8, 12), image_data((6, 9, 4))
    method = Flado(LOCAL, sketch=64)
    task, _ = second_round(method, model, data)
    part, real, calls = data.train.subset(torch.arange(6)), training.train, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise Diverged("too far")
        return real(*args)

    monkeypatch.setattr(training, "train", fails_once)
    update = method.perform(task, part, model)
    assert len(calls) == 2
    assert update.metrics["examples"] == 12
    assert update.metrics["reset"] == 1
    assert update.memory["probabilities"].unique().numel() == 1

    def fails_always(*args):
        raise Diverged("too far")

    monkeypatch.setattr(training, "train", fails_always)
    with pytest.raises(Diverged):
        method.perform(task, part, model)


def test_estimates_are_a_hundredth_of_the_local_steps_over_the_rounds():
    """A client with 40 steps in a round is due in every third round or so, and remembers what is left over."""
    method, task = Flado(LocalTraining(batch_size=1), estimator="score"), _task(40)
    due = []
    for _ in range(10):
        memory, now = method.due(task)
        task = replace(task, memory=memory)
        due.append(now)
    assert sum(due) == 4
    assert max(due) == 1
    assert Flado(LocalTraining(batch_size=1)).due(_task(1000))[1] == 10
    assert Flado(alignment_share=0).due(_task(1000))[1] == 0


def _task(examples: int):
    model = mlp_model()
    return Flado().assign(Flado().init(model), client(examples=examples), model, Seeds(0))


def test_a_budget_below_what_cannot_shrink_names_the_smallest_feasible_share():
    with pytest.raises(FedtailorError, match="smallest feasible share of this model is above"):
        Flado().cut_for(ServerState(0, {}), Budget(macs=4), mlp_model())


def test_a_network_without_elastic_channels_is_refused_unless_its_budget_is_full():
    with pytest.raises(FedtailorError, match="nothing in Sequential can shrink"):
        elastic(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), images(2).take(torch.arange(2)))
    whole = mlp_model()
    groups = replace(whole.groups, fixed=dict.fromkeys(whole.groups.counts, "is kept"))
    model = ElasticModel(whole.module, groups, whole.example)
    with pytest.raises(
        FedtailorError, match="no channel of this model can shrink.*feasible share of it is 1"
    ):
        Flado().cut_for(Flado().init(model), Budget(macs=0.5), model)
    assert Flado().cut_for(Flado().init(model), Budget(macs=1.0), model) == Cut.everything()


@pytest.mark.parametrize("wrong", [[-0.1], [1.5], [float("nan")]])
def test_probabilities_out_of_range_are_refused(wrong):
    model = mlp_model()
    probabilities = np.array(wrong + [0.5] * (model.units.total - 1))
    with pytest.raises(FedtailorError, match="expected 8 numbers from 0 to 1"):
        project(model.costs, probabilities, Budget(macs=0.5))
    with pytest.raises(FedtailorError, match="expected 8 numbers from 0 to 1"):
        project(model.costs, np.full(3, 0.5), Budget(macs=0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alignment_share": 1.5}, "method.alignment_share = 1.5"),
        ({"alignment_step": 0}, "method.alignment_step = 0"),
        ({"smallest_probability": 0}, "method.smallest_probability = 0"),
        ({"sketch": 0}, "method.sketch = 0"),
        ({"estimator": "guess"}, "unknown estimator 'guess'"),
        ({"persistence": 1}, "method.persistence = 1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(FedtailorError, match=message):
        Flado(**settings)
