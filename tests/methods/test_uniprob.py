"""UniProb: the probability that meets a budget, and real sparse steps."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.expected import expected_macs, uniform_probability
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.running.layout import laid_out
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.methods.dropping import draw_active, slowed, started
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.uniprob import UniProb
from fedtailor.models import build_model
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, differing, group_of, image_data, mlp_model, run, task_for, vectors

LOCAL = LocalTraining(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)


class SquareStage(nn.Module):
    """A residual stage: input and output of `inner` belong to one group, so its cost grows with the square."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 10, 3, padding=1)
        self.inner = nn.Conv2d(10, 10, 3, padding=1)
        self.classifier = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.classifier((x + F.relu(self.inner(x))).mean((2, 3)))


def flat(model, probability: float):
    return {group: np.full(model.groups.counts[group], probability) for group in model.groups.elastic}


def test_a_full_budget_is_fedavg_bit_for_bit():
    model, data = cnn_model(), image_data((6, 9, 4))
    ours = run(UniProb(LOCAL, "averaged"), model, data, rounds=3).state.weights
    assert not differing(ours, run(FedAvg(LOCAL), model, data, rounds=3).state.weights)


@pytest.mark.parametrize(
    "build", [lambda: cnn_model(8, 12), lambda: elastic(SquareStage(), image_data().example())]
)
@pytest.mark.parametrize("probability", [0.2, 0.6])
def test_mean_cost_of_drawn_networks_is_the_expected_cost(build, probability):
    """Monte Carlo within 1 %; the draws that were rescued from emptiness are rare enough not to matter."""
    model = build()
    generator = np.random.default_rng(0)
    draws = 20_000
    counts = {
        g: generator.binomial(model.groups.counts[g], probability, size=draws) for g in model.groups.elastic
    }
    curve = model.costs.curve("macs")
    sizes = np.stack([counts[g] for g in model.groups.elastic], axis=1)
    mean = np.mean([curve.at(row) for row in sizes]) / 2  # the example batch holds two
    assert expected_macs(model.costs, flat(model, probability)) == pytest.approx(mean, rel=0.01)


def test_expected_cost_at_one_is_the_full_cost():
    model = elastic(SquareStage(), image_data().example())
    assert expected_macs(model.costs, flat(model, 1.0)) == model.cost(Cut.everything()).macs


@pytest.mark.parametrize("share", [0.1, 0.34, 0.64, 0.9])
def test_the_probability_meets_the_budget(share):
    model = cnn_model(16, 24)
    probability = uniform_probability(model.costs, Budget(macs=share))
    assert expected_macs(model.costs, flat(model, probability)) == pytest.approx(
        share * model.cost(Cut.everything()).macs, rel=1e-9
    )


def test_published_probabilities_of_vgg9():
    """FedDrop solves .190 / .580 / .799 with dense classifier layers; ours shrink too, so p is a little larger."""
    network = build_model("vgg9", input_shape=(3, 32, 32), num_classes=10)
    model = elastic(network, (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)))
    solved = [uniform_probability(model.costs, Budget(macs=share)) for share in (0.04, 0.34, 0.64)]
    assert solved == pytest.approx([0.190, 0.580, 0.799], abs=0.01)
    assert all(ours > theirs for ours, theirs in zip(solved, [0.190, 0.580, 0.799], strict=True))


def test_a_width_budget_allows_what_its_prefix_costs():
    model = mlp_model(hidden=20)
    probability = uniform_probability(model.costs, Budget(width=0.5))
    assert probability == pytest.approx(0.5, abs=0.01)


def test_an_infeasible_budget_names_the_smallest_feasible_share():
    """What cannot shrink costs something: here the classifier's bias."""
    with pytest.raises(FedtailorError, match="smallest feasible share"):
        uniform_probability(mlp_model().costs, Budget(macs=4))


def test_every_step_draws_anew_and_never_an_empty_group():
    model = cnn_model(8, 8)
    method = UniProb()
    who = client(width=0.25)
    task = method.prepare(method.assign(method.init(model), who, model, Seeds(0)), None, model)
    cuts = [method.step_cuts(task, step, model)[0] for step in range(60)]
    assert len(set(cuts)) > 50
    assert cuts == [method.step_cuts(task, step, model)[0] for step in range(60)]
    nothing = draw_active(model.groups, flat(model, 0.0), np.random.default_rng(0))
    assert [len(units) for units in nothing.channels.values()] == [1, 1]


def test_channels_that_are_never_drawn_keep_their_bits_with_momentum_and_decay():
    """One step: only the drawn channels may move."""
    model = cnn_model(8, 8)
    data = image_data((4,))
    method = UniProb(LocalTraining(lr=0.1, momentum=0.9, weight_decay=0.1, batch_size=4, steps=1))
    fleet = Fleet((Tier("small", Budget(macs=0.3), 1),))
    before, after = method.init(model).weights, run(method, model, data, fleet).state.weights
    task = method.assign(method.init(model), client(0), model, Seeds(0))
    task = method.prepare(_with_budget(task, Budget(macs=0.3)), None, model)
    (cut,) = method.step_cuts(task, 0, model)
    rows = cut.channels[group_of(model, "4.weight", 0)]
    resting = [row for row in range(8) if row not in rows]
    assert resting
    assert torch.equal(before["4.weight"][resting], after["4.weight"][resting])
    assert not torch.equal(before["4.weight"][list(rows)], after["4.weight"][list(rows)])


def _with_budget(task, budget):
    return replace(task, client=replace(task.client, budget=budget))


def test_work_counts_what_the_budget_allows_and_bytes_the_full_model():
    model = cnn_model(16, 16)
    method = UniProb()
    full = model.cost(Cut.everything())
    task = _with_budget(method.assign(method.init(model), client(), model, Seeds(0)), Budget(macs=0.25))
    assert method.work(task, model).macs == round(3 * 0.25 * full.macs)
    assert task.patch.nbytes == sum(
        value.numel() * 4 for name, value in model.weights().items() if name not in model.statistics
    )


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_slowed_filters_have_p_times_the_mean_and_p_squared_times_the_variance(probability):
    """All masks enumerated: with 1 / p the mean is that of a dense step, the variance (1 - p) / p times its square."""
    model = mlp_model(4)
    weights, batch = model.weights(), vectors(6).take(torch.arange(6))
    # What a client holds is told from a draw by its address: here a draw of all units has its factors too.
    elsewhere = Patch(model.cut(weights, Cut.everything()).values, Cut({"elsewhere": range(1)}))
    task = replace(task_for(model), patch=elsewhere, prepared={"probability": probability})

    def gradient(forward, cut):
        leaves = {n: v.detach().requires_grad_() for n, v in model.cut(weights, cut).values.items()}
        output = forward(leaves, cut)
        (output * torch.arange(output.numel()).view_as(output)).sum().backward()  # linear in the hidden layer
        return leaves["0.bias"].grad

    def moments(method):
        mean, square = torch.zeros(4), torch.zeros(4)
        for mask in itertools.product((0, 1), repeat=4):
            kept = [unit for unit in range(4) if mask[unit]]
            chance = math.prod(probability if bit else 1 - probability for bit in mask)
            if kept:
                cut = Cut.of(model.groups, {model.groups.elastic[0]: kept})
                found = gradient(lambda w, c: method.forward(w, c, batch, task, model), cut)
                full = torch.zeros(4).index_copy(0, torch.tensor(kept), found)
                mean, square = mean + chance * full, square + chance * full**2
        return mean, square - mean**2

    dense = gradient(lambda w, c: model.forward(w, c, batch, mode="train"), Cut.everything())
    mean, variance = moments(UniProb(slowed_filters=False))
    torch.testing.assert_close(mean, dense, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(variance, dense**2 * (1 - probability) / probability, rtol=1e-3, atol=1e-2)
    slow_mean, slow_variance = moments(UniProb(slowed_filters=True))
    torch.testing.assert_close(slow_mean, probability * dense, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(slow_variance, probability**2 * variance, rtol=1e-3, atol=1e-2)


class Deep(nn.Module):
    """Four wide layers without norms."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        sizes = [width] * 4
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in itertools.pairwise([16, *sizes]))
        self.classifier = nn.Linear(width, 4)

    def hidden(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer in self.layers:
            x = F.relu(layer(x))
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.hidden(x)[-1])


@pytest.mark.parametrize("probability", [0.2, 0.6])
def test_a_sparse_start_keeps_the_second_moment_of_drawn_networks(probability):
    """Layer after layer under fresh draws with 1 / p; PyTorch's own start changes it by 1 / (6 p) in each."""
    with Seeds(5).scope("deep network"):
        module = Deep()
    x, generator = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)), np.random.default_rng(1)
    model = elastic(module, (x[:2], torch.zeros(2, dtype=torch.long)))
    weights = started(model.weights(), probability, model)
    assert {name for name in weights if not torch.equal(weights[name], model.weights()[name])} == {
        "layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.3.weight", "classifier.weight",
    }  # fmt: skip
    moments = []
    for start in (weights, model.weights()):
        last = []
        for _ in range(40):
            hidden = x
            for number in range(4):
                drawn = torch.from_numpy((generator.random(256) < probability) / probability).float()
                hidden = F.relu(F.linear(hidden, start[f"layers.{number}.weight"])) * drawn
            last.append(float(hidden.square().mean()))
        moments.append(float(np.mean(last)))
    square = float(x.square().mean())
    assert moments == pytest.approx([square, square / (6 * probability) ** 4], rel=0.3)


def test_a_sparse_start_scales_mean_and_deviation_of_an_update_alike():
    """A step moves the hidden bias along what reads it: a start that is s times as large makes it s times as far."""
    model = mlp_model(4)
    own, scaled = model.weights(), started(model.weights(), 0.5, model)
    factor = float(scaled["2.weight"].std() / own["2.weight"].std())
    assert float(scaled["2.weight"].double().std(correction=0)) == pytest.approx(math.sqrt(2 * 0.5 / 4))
    torch.testing.assert_close(scaled["2.weight"], own["2.weight"] * factor)
    batch = vectors(6).take(torch.arange(6))

    def gradient(reader: Tensor) -> Tensor:
        bias = own["0.bias"].clone().requires_grad_()
        hidden = F.relu(F.linear(batch[0], own["0.weight"], bias))
        F.linear(hidden, reader).sum().backward()
        return bias.grad

    torch.testing.assert_close(gradient(scaled["2.weight"]), factor * gradient(own["2.weight"]))


def test_scaling_at_evaluation_multiplies_by_the_mean_probability_over_clients_and_rounds():
    model, data = cnn_model(8, 8), image_data((6, 6, 6))
    fleet = Fleet((Tier("small", Budget(macs=0.3), 1), Tier("large", Budget(macs=0.9), 2)))
    method = UniProb(LOCAL, "averaged", scaling="eval")
    state = run(method, model, data, fleet, rounds=2).state
    small, large = (uniform_probability(model.costs, Budget(macs=share)) for share in (0.3, 0.9))
    mean = (small + 2 * large) / 3  # as many examples each, everyone in both rounds
    (plain,) = replace(method, scaling="none").deploy(state, Budget(), model).patches
    (scaled,) = method.deploy(state, Budget(), model).patches
    assert differing(plain.values, scaled.values) == {"4.weight", "8.weight"}  # they read drawn channels
    torch.testing.assert_close(scaled.values["8.weight"], plain.values["8.weight"] * mean)


def test_without_scaling_at_evaluation_clients_say_nothing_of_probabilities():
    model, data = cnn_model(8, 8), image_data((6, 6))
    history = run(UniProb(LOCAL, "averaged"), model, data, Fleet((Tier("small", Budget(macs=0.3), 1),)))
    assert not history.state.memory


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scaling": "both"}, "unknown scaling 'both'"),
        ({"sparse_start": 1.5}, "method.sparse_start = 1.5: expected a number from 0 to 1"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(FedtailorError, match=words):
        UniProb(**settings)


def test_a_slowed_filter_that_was_drawn_alone_can_learn_from_one_example():
    """With the stride that ``view_as`` gives it, PyTorch 2.13 refuses: "grad_weight must be contiguous"."""
    layers = (nn.Conv2d(1, 3, 5), nn.Conv2d(3, 7, 5), nn.Conv2d(7, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    network, x, y = nn.Sequential(*layers), torch.randn(1, 1, 12, 12), torch.zeros(1, dtype=torch.long)
    model = elastic(network, (x.repeat(2, 1, 1, 1), y.repeat(2)))
    cut = Cut.of(model.groups, {group_of(model, "2.weight", 0): [0]})
    held = laid_out(model.cut(model.weights(), cut).values, torch.channels_last)
    for value in held.values():
        value.requires_grad_()
    probabilities = np.full(sum(model.groups.counts.values()), 0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more of them, PyTorch takes another way
    try:
        made = slowed(held, probabilities, cut, model)
        model.forward(made, cut, (x, y), mode="train").sum().backward()
    finally:
        torch.set_num_threads(threads)
    assert held["2.weight"].shape == (1, 7, 3, 3)
    assert bool(held["2.weight"].grad.any())
