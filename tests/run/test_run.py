"""The Python interface, as the README shows it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor
from fedtailor import Budget, FederatedData, FedtailorError
from fedtailor.data.batches import Examples
from fedtailor.methods.splitmix import SplitMix

SETTINGS = {"rounds": 2, "clients_per_round": 3, "evaluate_every": 2}


def small_data(classes: int = 3, clients: int = 5, named: bool = False) -> FederatedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator)
    y = torch.randint(0, classes, (80,), generator=generator)
    columns = {"features": x, "label": y} if named else (x, y)
    examples = Examples(columns)
    return FederatedData.from_examples(
        examples.subset(torch.arange(60)),
        examples.subset(torch.arange(60, 80)),
        clients=clients,
        num_classes=classes,
    )


class Named(nn.Module):
    """A module that takes its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 10)
        self.answer = nn.Linear(10, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.answer(F.relu(self.hidden(features)))


def test_train_returns_tiers_and_plain_submodels_and_leaves_the_module_alone():
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    before = copy.deepcopy(module.state_dict())
    run = fedtailor.train(module, small_data(), method="heterofl", **SETTINGS)
    assert list(run.tiers) == ["0.2", "0.4", "0.6", "0.8", "1"]
    assert all(0 <= tier["accuracy"] <= 1 for tier in run.tiers.values())
    small = run.submodel(0.4)
    assert type(small) is nn.Sequential
    assert small[0].weight.shape == (4, 6)
    assert small(torch.zeros(2, 6)).shape == (2, 3)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.training


def test_submodel_of_any_budget_also_one_that_no_tier_has():
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    run = fedtailor.train(module, small_data(), method="heterofl", **SETTINGS)
    assert run.submodel("3/10")[0].weight.shape == (3, 6)
    limited = run.submodel(Budget(params=80))
    assert sum(parameter.numel() for parameter in limited.parameters()) <= 80
    with pytest.raises(FedtailorError, match="smallest cut"):
        run.submodel(Budget(params=2))


def test_submodel_computes_what_the_run_evaluated():
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    data = small_data()
    run = fedtailor.train(module, data, method="heterofl", **SETTINGS)
    x, y = data.test.take(torch.arange(len(data.test)))
    for tier in ("0.2", "1"):
        accuracy = (run.submodel(tier)(x).argmax(-1) == y).double().mean().item()
        assert accuracy == pytest.approx(run.tiers[tier]["accuracy"], abs=1e-9)


def test_an_ensemble_is_one_module():
    """Split-Mix gives a device several networks; they load, save and answer as one."""
    module = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    data = small_data()
    run = fedtailor.train(module, data, fleet="uniform-2", method=SplitMix(base=0.25), **SETTINGS)
    deployed = run.submodel(1)
    assert len(deployed.members) == 4
    x, y = data.test.take(torch.arange(len(data.test)))
    assert torch.equal(deployed(x), torch.stack([member(x) for member in deployed.members]).mean(0))
    accuracy = (deployed(x).argmax(-1) == y).double().mean().item()
    assert accuracy == pytest.approx(run.tiers["1"]["accuracy"], abs=1e-9)
    assert type(run.submodel(0.25)) is nn.Sequential


def test_dict_batches_own_loss_and_own_metric():
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["label"], label_smoothing=0.1)

    def errors(output: Tensor, batch: dict[str, Tensor]) -> float:
        return float((output.argmax(-1) != batch["label"]).sum()) / len(output)

    run = fedtailor.train(
        Named(), small_data(named=True), method="fedavg", loss=loss, metrics={"errors": errors}, **SETTINGS
    )
    assert set(run.tiers["1"]) == {"loss", "errors"}
    assert 0 <= run.tiers["1"]["errors"] <= 1


def test_pretrained_weights_are_the_start():
    """With a learning rate of almost nothing, what comes out is what went in."""
    module = Named()
    run = fedtailor.train(
        module, small_data(named=True), fleet="equal", method="fedavg", training={"lr": 1e-12}, **SETTINGS
    )
    for name, value in module.state_dict().items():
        assert torch.allclose(run.state.weights[name], value, atol=1e-9)


def test_frozen_parameters_stay():
    module = Named()
    module.hidden.weight.requires_grad_(False)
    run = fedtailor.train(module, small_data(named=True), method="fedavg", training={"lr": 0.5}, **SETTINGS)
    assert "hidden.weight" not in run.state.weights  # it stays with the module, and is in what is deployed
    assert not torch.equal(run.state.weights["answer.weight"], module.answer.weight)
    small = run.submodel(0.5).hidden.weight
    assert not small.requires_grad
    assert torch.equal(small, module.hidden.weight[: len(small)])


def test_same_seed_same_bits_other_seed_differs():
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return fedtailor.train(Named(), small_data(named=True), seed=seed, **SETTINGS).state.weights

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_global_random_state_and_thread_count_are_left_alone():
    module, data = Named(), small_data(named=True)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    fedtailor.train(module, data, **SETTINGS)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({"fleet": "uniform"}, "unknown fleet"),
        ({"data": "digit"}, "unknown dataset"),
        ({"rounds": 0}, "rounds = 0"),
        ({"clients_per_round": 6}, "at most 5"),
        ({"training": {"lrr": 1}}, "did you mean 'lr'"),
        ({"training": {"lr": 0}}, "training.lr = 0"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"fleet": "uniform-7"}, "7 tiers"),
    ],
)
def test_bad_arguments_are_named(change, words):
    arguments = {"data": small_data(named=True), **SETTINGS, **change}
    with pytest.raises(FedtailorError, match=words.replace("(", r"\(")):
        fedtailor.train(Named(), **arguments)


def test_too_few_outputs_for_the_labels():
    module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    with pytest.raises(FedtailorError, match="3 outputs, but the labels of own data go up to 4"):
        fedtailor.train(module, small_data(classes=5), **SETTINGS)


def test_public_list_is_complete_and_importable():
    assert "train" in dir(fedtailor)
    for name in fedtailor.__all__:
        assert getattr(fedtailor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'adapt'"):
        _ = fedtailor.adapt
    assert callable(fedtailor.elastic)
