"""The network that is deployed is the network that was trained: one function, for every method that scales outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import fleet_by_name
from fedtailor.methods.registry import get_method
from fedtailor.methods.splitmix import by_base
from helpers import CLASSES, image_data, images, run, task_for

FLEET = "uniform-2"
LOCAL = LocalTraining(lr=0.05, momentum=0.9, batch_size=4)
SCALED: dict[str, dict[str, Any]] = {
    "heterofl": {},
    "fedrolex": {},
    "splitmix": {"base": 0.5, "scaler": True},
    "federated-dropout": {"keep": 0.5, "scaling": "train"},
    "efd": {"scaling": "train", "global_width": 0.5},
    "uniprob": {},
    "flado": {"sketch": 32},
}
NORMS: dict[str, Any] = {
    "none": lambda _channels: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
}


def network(norm: str) -> ElasticModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), NORMS[norm](8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), NORMS[norm](8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, CLASSES),
        )  # fmt: skip
    return elastic(module, images(4).take(torch.arange(4)))


@pytest.fixture(scope="module", params=list(NORMS))
def model(request) -> ElasticModel:
    return network(request.param)


def trained_form(method, state, cut: Cut, model: ElasticModel, number: int, batch) -> torch.Tensor:
    """What a client that holds this piece computes in training, on the statistics of the batch."""
    weights = state.weights if method.name != "splitmix" else by_base(state.weights)[number]
    held = model.cut(weights, cut) if method.name != "splitmix" else Patch(dict(weights), cut)
    values = {name: value for name, value in held.values.items() if name not in model.statistics}
    task = replace(task_for(model, cut), patch=Patch(values, cut))
    prepared = {"probability": 1.0}
    task = replace(task, prepared=prepared, memory={"probabilities": torch.ones(model.units.total).double()})
    return method.forward(values, cut, batch, task, model).detach()


@pytest.mark.parametrize("name", SCALED)
def test_the_deployed_piece_computes_what_the_training_form_computes(name, model):
    method, data = get_method(name)(**{"local": LOCAL, **SCALED[name]}), image_data((8, 8, 8, 8))
    state = run(method, model, data, FLEET, rounds=2, cohort=4).state
    batch = images(12, seed=3).take(torch.arange(12))
    seen = 0
    for tier in fleet_by_name(FLEET).tiers:
        for number, patch in enumerate(method.deploy(state, tier.budget, model).patches):
            values = {n: v for n, v in patch.values.items() if n not in model.statistics}
            ours = model.forward(values, patch.cut, batch, mode="train").detach()
            expected = trained_form(method, state, patch.cut, model, number, batch)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
            built = model.build(patch).eval()
            deployed = model.forward(patch.values, patch.cut, batch)
            torch.testing.assert_close(built(batch[0]), deployed, rtol=1e-5, atol=1e-6)
            seen += 1
    assert seen >= 2


@pytest.mark.parametrize("name", ["heterofl", "splitmix"])
def test_without_norms_a_narrow_piece_carries_its_factor(name):
    """Without the factor it would be another function: the test above can fail."""
    model, data = network("none"), image_data((8, 8, 8, 8))
    method = get_method(name)(**{"local": LOCAL, **SCALED[name]})
    state = run(method, model, data, FLEET, rounds=1, cohort=4).state
    small, *_ = method.deploy(state, fleet_by_name(FLEET).tiers[0].budget, model).patches
    bare, *_ = (
        replace(method, scaler=False).deploy(state, fleet_by_name(FLEET).tiers[0].budget, model).patches
    )
    for layer in ("0", "3", "8"):
        assert torch.equal(small.values[f"{layer}.weight"], 2 * bare.values[f"{layer}.weight"])
        assert torch.equal(small.values[f"{layer}.bias"], 2 * bare.values[f"{layer}.bias"])
    assert torch.equal(small.values["10.weight"], bare.values["10.weight"])  # the classifier keeps its scale


def test_statistics_are_measured_on_the_piece_that_will_run():
    """Behind a convolution whose factor is 2 the mean is twice and the variance four times that of the bare piece."""
    model, data = network("batch"), image_data((8, 8, 8, 8))
    method = get_method("heterofl")(local=LOCAL)
    state = run(method, model, data, FLEET, rounds=1, cohort=4).state
    (small,) = method.deploy(state, fleet_by_name(FLEET).tiers[0].budget, model).patches
    weights = {n: v for n, v in state.weights.items() if "@" not in n}
    bare = replace(method, scaler=False)
    plain = run(bare, model, data, FLEET, rounds=1, cohort=4)
    assert weights.keys() == {n for n in plain.state.weights if "@" not in n}
    inputs = torch.cat([data.client(number).take(torch.arange(8))[0] for number in range(4)])
    features = nn.functional.conv2d(inputs, small.values["0.weight"], small.values["0.bias"], padding=1)
    mean = torch.stack([part.mean((0, 2, 3)) for part in features.split(4)]).mean(0)
    torch.testing.assert_close(small.values["1.running_mean"], mean, rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """An embedding whose table is the decoder's weight, and a recurrent layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.middle = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(torch.relu(self.middle(self.lstm(self.embedding(tokens))[0])))


def test_layers_that_cannot_carry_a_factor_are_not_scaled():
    from fractions import Fraction

    from fedtailor.elasticity.cutting.selections import prefix
    from fedtailor.elasticity.running.norm import POLICIES
    from fedtailor.elasticity.running.scaling import scaler

    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    model = elastic(Tied(), (tokens, tokens))
    cut = prefix(model.groups, Fraction(1, 2))
    assert scaler(model, cut, POLICIES["averaged"]) in ({"middle": 2.0}, {})
