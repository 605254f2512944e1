"""Ranks of adapters by peft's structure, without a trace: on a class that no trace could follow, and without peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.elasticity import adapters
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.tracing.rules import TraceError
from fedtailor.errors import FedtailorError
from fedtailor.messages import Lease, Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.models.pretrained import load_pretrained
from fedtailor.seeds import Seeds
from helpers import client
from odd_networks import LowRank

BATCH = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0]))


class Adapted(nn.Module):
    """A layer as peft makes it: factors in dictionaries by the adapter's name, rank and scale as attributes."""

    def __init__(self, inputs: int, outputs: int, rank: int, between: nn.Module | None = None) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        self.r, self.scaling = {"default": rank}, {"default": 16 / rank}
        self.between = between or nn.Identity()
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B["default"](self.between(self.lora_A["default"](x)))
        return self.base_layer(x) + low * self.scaling["default"]


class Untraceable(nn.Module):
    """Code that looks at numbers, which no trace follows."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = Adapted(6, 10, 4, between), Adapted(10, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.second(x if float(x.abs().sum().item()) >= 0 else -x)


def network(**options: Any) -> nn.Module:
    with Seeds(0).scope("network"):
        return Untraceable(**options)


def test_ranks_are_found_by_structure_and_nothing_is_traced():
    model = elastic(network(), BATCH)
    assert model.groups.counts == {"first": 4, "second": 8}
    assert model.groups.tensors("first") == [
        ("first.lora_A.default.weight", 0),
        ("first.lora_B.default.weight", 1),
    ]
    assert "forward was checked, not traced" in model.explain()
    half = model.submodel(0.5)
    assert half.second.r == {"default": 4}
    assert half.second.lora_A["default"].out_features == half.second.lora_B["default"].in_features == 4
    assert half.second.scaling == {"default": 2.0}  # that of the full rank
    assert half(BATCH[0]).shape == (4, 3)


def test_only_what_is_trained_travels_and_bytes_are_the_share_of_the_rank():
    model = elastic(network(), BATCH)
    assert set(model.weights()) == {f"{n}.lora_{f}.default.weight" for n in ("first", "second") for f in "AB"}
    full = model.cost(Cut.everything())
    assert full.bytes == 4 * (4 * (6 + 10) + 8 * (10 + 3))
    assert full.params == full.bytes // 4 + 6 * 10 + 10 + 10 * 3 + 3
    quarter = model.fit(Budget(bytes="25%"))
    assert model.cost(quarter).bytes * 4 == full.bytes
    task = FedAvg(width="1/4").assign(FedAvg().init(model), client(0), model, Seeds(0))
    assert task.nbytes == model.cost(quarter).bytes
    assert task.lease.names == set(model.weights())


def test_a_small_rank_is_the_full_module_with_the_others_at_zero():
    model = elastic(network(), BATCH)
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(value.shape, generator=generator) for name, value in model.weights().items()}
    cut = Cut.of(model.groups, {"first": [0, 2], "second": [1, 6, 7]})
    masked = {name: value.clone() for name, value in weights.items()}
    for name, kept in (("first", [0, 2]), ("second", [1, 6, 7])):
        gone = [unit for unit in range(model.groups.counts[name]) if unit not in kept]
        masked[f"{name}.lora_A.default.weight"][gone] = 0
    small = model.build(model.cut(weights, cut))
    torch.testing.assert_close(small(BATCH[0]), model.forward(masked, Cut.everything(), BATCH))


def test_an_adapter_that_mixes_its_ranks_fails_the_check():
    with pytest.raises(TraceError, match="the check of the adapters' ranks failed"):
        elastic(network(between=nn.Softmax(dim=-1)), BATCH)


def test_keep_leaves_a_layer_its_rank_and_a_wrong_name_is_refused():
    model = elastic(network(), BATCH, keep=["second"])
    assert model.groups.elastic == ("first",)
    with pytest.raises(FedtailorError, match=r"keep = 'third': expected an adapted layer, such as 'first'"):
        elastic(network(), BATCH, keep=["third"])


def test_an_adapter_that_is_not_trained_has_no_elastic_rank():
    module = network()
    assert isinstance(module, Untraceable)
    module.first.lora_A.requires_grad_(False)
    module.first.lora_B.requires_grad_(False)
    assert elastic(module, BATCH).groups.elastic == ("second",)


def test_factors_are_pairs_of_which_the_product_alone_matters():
    model = elastic(network(), BATCH)
    assert [(pair.up, pair.down) for pair in adapters.factors(model)] == [
        (f"{layer}.lora_B.default.weight", f"{layer}.lora_A.default.weight") for layer in ("first", "second")
    ]
    bent = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    assert adapters.factors(elastic(bent, BATCH)) == ()
    own = nn.Sequential(LowRank(6, 3, 4))
    assert [pair.group for pair in adapters.factors(elastic(own, BATCH))] == ["0.down"]


def test_frozen_tensors_are_the_modules_own_at_every_cut_and_stay():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].requires_grad_(False)
    model = elastic(module, BATCH)
    assert model.frozen == {"0.weight", "0.bias"}
    (group,) = model.groups.elastic
    cut = Cut.of(model.groups, {group: [1, 4, 5]})
    patch = model.cut(model.weights(), cut)
    assert set(patch.values) == {"2.weight", "2.bias"}
    assert torch.equal(model.build(patch)[0].weight, module[0].weight[[1, 4, 5]])
    task = Task(client(0), 0, patch, Lease(frozenset(patch.values), cut), Seeds(0))
    assert task.nbytes == 4 * (3 * 3 + 3)


def test_a_run_of_adapters_can_be_started_from_though_it_has_nothing_that_is_frozen(tmp_path):
    module = network()
    found = {name: torch.ones_like(value) for name, value in elastic(module, BATCH).weights().items()}
    frozen = module.first.base_layer.weight.clone()
    load_pretrained(module, found, tmp_path)
    assert torch.equal(module.first.base_layer.weight, frozen)
    assert bool((module.second.lora_B["default"].weight == 1).all())
    partly = {**found, "first.base_layer.weight": frozen}
    with pytest.raises(FedtailorError, match="it has no 'first.base_layer.bias', which the model needs"):
        load_pretrained(module, partly, tmp_path)
