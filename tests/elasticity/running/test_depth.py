"""A cut may leave out whole tensors: a network without its last block is trained, merged, evaluated and built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedtailor
import fedtailor.elasticity.costing.memory
import fedtailor.elasticity.cutting.selections
import fedtailor.fleet
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.method import Method
from helpers import CLASSES, bits, differing, image_data, images, run, task_for, update_of


class Tail(nn.Module):
    """The last block and its head; a network without them answers with the first head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, early: Tensor, features: Tensor) -> Tensor:
        return early + self.head(self.block(features).mean((2, 3)))


class TwoHeads(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.early = nn.Linear(width, CLASSES)
        self.tail = Tail(width)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        return self.tail(self.early(features.mean((2, 3))), features)


@pytest.fixture(scope="module")
def model() -> ElasticModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fedtailor.elastic(TwoHeads(), images(2).take(torch.arange(2)))


def shallow(model: ElasticModel, width: str = "1") -> Cut:
    """Without the last block, at a width."""
    cut = prefix(model.groups, fedtailor.elasticity.cutting.selections.as_width(width))
    last = [name for name in model.groups.extents if name.startswith("tail.")]
    return cut.without(last, f"{width} shallow")


@dataclass(frozen=True)
class ByHand(Method):
    """Devices of less than the full width hold half of it, and no last block."""

    def cut_for(self, state, budget, model):
        return Cut.everything() if budget.width == 1 else shallow(model, "1/2")


def test_the_piece_is_the_network_of_the_first_head(model):
    patch = model.cut(model.weights(), shallow(model))
    assert {name.partition(".")[0] for name in patch.values} == {"first", "early"}
    batch = images(5).take(torch.arange(5))
    network = model.module
    network.eval()
    expected = network.early(network.first(batch[0]).mean((2, 3)))
    assert torch.equal(model.forward(patch.values, patch.cut, batch), expected)
    assert torch.equal(model.build(patch).eval()(batch[0]), expected)
    whole = model.cut(model.weights(), Cut.everything())
    assert torch.equal(
        model.forward(whole.values, whole.cut, batch), network(batch[0])
    )  # its layers are back


def test_what_it_costs(model):
    whole, piece = model.cost(Cut.everything()), model.cost(shallow(model))
    tail = sum(value.numel() for value in model.module.tail.parameters())
    assert whole.params - piece.params == tail
    assert piece.params == sum(
        p.numel() for name, p in model.module.named_parameters() if not name.startswith("tail")
    )
    assert piece.macs == 6 * 9 * 16 + 6 * 16 + 6 * CLASSES + CLASSES
    workload = fedtailor.elasticity.costing.memory.Workload(4)
    assert (
        0
        < model.cost(shallow(model), workload).training_memory
        < model.cost(Cut.everything(), workload).training_memory
    )  # type: ignore[operator]


def test_cuts_with_and_without_the_block(model):
    full, half, small = Cut.everything(), shallow(model), shallow(model, "1/2")
    assert full.holds(half)
    assert half.holds(small)
    assert not half.holds(full)
    assert not small.holds(half)
    assert len({full, half, small}) == 3
    assert cut_from(cut_value(small)) == small
    assert replace(half, absent=frozenset()) == full


@pytest.mark.parametrize("policy", ["averaged", "static", "per_width"])
def test_it_trains_merges_and_evaluates(model, policy):
    data = image_data((6, 5, 7, 4))
    method = ByHand(norm=policy)
    result = run(method, model, data, "uniform-2", rounds=2, cohort=4)
    before, after = method.init(model).weights, result.state.weights
    moved = differing(before, after)
    assert {"first.0.weight", "early.weight", "tail.head.weight"} <= moved
    batch = data.test.take(torch.arange(4))
    for tier in fedtailor.fleet.fleet_by_name("uniform-2").tiers:
        (patch,) = method.deploy(result.state, tier.budget, model).patches
        assert patch.cut == method.cut_for(result.state, tier.budget, model)
        output = model.build(patch).eval()(batch[0])
        assert torch.allclose(output, model.forward(patch.values, patch.cut, batch), atol=1e-6)


def test_coordinates_of_the_missing_block_keep_their_bits(model):
    method, weights = ByHand(), model.weights()
    patch = model.cut({name: value + 1 for name, value in weights.items()}, shallow(model, "1/2"))
    after = method.merge(method.init(model), [update_of(0, patch)], model).weights
    for name, value in weights.items():
        if name.startswith("tail."):
            assert bits(after[name]) == bits(value)
    assert not torch.equal(after["first.0.weight"], weights["first.0.weight"])


def test_an_answer_with_the_block_that_was_not_leased_is_refused(model):
    from fedtailor.server.checking import check_update

    task = task_for(model, shallow(model))
    fine = update_of(0, task.patch, weight=1)
    assert check_update(task, fine, model) is None
    whole = update_of(0, model.cut(model.weights(), Cut.everything()), weight=1)
    assert check_update(task, whole, model) is not None
    disguised = update_of(0, replace(task.patch, cut=replace(task.patch.cut, absent=frozenset())), weight=1)
    assert check_update(task, disguised, model).reason == "out-of-lease"  # type: ignore[union-attr]


def test_a_graph_that_stands_in_has_no_layers_to_skip():
    class Literal(TwoHeads):
        def forward(self, x: Tensor) -> Tensor:
            features = self.first(x).reshape(-1, 6, 16).reshape(-1, 6, 4, 4)
            return self.tail(self.early(features.mean((2, 3))), features)

    model = fedtailor.elastic(Literal(), images(4).take(torch.arange(4)))
    assert not model.own_class
    cut = shallow(model)
    with pytest.raises(FedtailorError, match="layers cannot be skipped"):
        model.build(model.cut(model.weights(), cut))
