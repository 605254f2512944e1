"""A cut may leave out whole tensors: a network without its last block is trained, merged, evaluated and built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor
import fedtailor.fleet
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import meets
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.cutting.levels import Levels, Mask
from fedtailor.elasticity.cutting.selections import as_width, prefix, random_units, window
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.switchable import switchable
from fedtailor.errors import FedtailorError
from fedtailor.messages import Lease
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.server.checking import check_update
from fedtailor.storage.patch_frames import LeasedFrame, decode_patch, encode_patch
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
    cut = prefix(model.groups, as_width(width))
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
    workload = Workload(4)
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


def test_parts_of_a_layer_and_unknown_tensors_make_no_network(model):
    weights, batch = model.weights(), images(2).take(torch.arange(2))
    part = Cut.everything().without(["early.weight"], "part")
    for use in (
        lambda: model.forward(model.cut(weights, part).values, part, batch),
        lambda: model.build(model.cut(weights, part)),
    ):
        with pytest.raises(FedtailorError, match=r"leaves out early.weight and keeps early.bias"):
            use()
    odd = model.cut(weights, Cut.everything().without(["nonsense"], "odd"))
    with pytest.raises(FedtailorError, match="unknown tensor to leave out 'nonsense'"):
        model.forward(odd.values, odd.cut, batch)
    whole = model.cut(weights, Cut.everything())
    model.module.eval()
    assert torch.equal(
        model.forward(whole.values, whole.cut, batch), model.module(batch[0])
    )  # nothing is left behind


@pytest.mark.parametrize("order", [1, -1])
def test_local_steps_of_two_depths(model, order):
    @dataclass(frozen=True)
    class Both(Method):
        def step_cuts(self, task, step, model):
            return [shallow(model), Cut.everything()][::order]

    result = run(Both(), model, image_data((6, 5)), rounds=1, cohort=2)
    moved = differing(Both().init(model).weights, result.state.weights)
    assert {"early.weight", "tail.head.weight"} <= moved


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_scaling_and_label_rows_without_the_last_block(model, name):
    kind = get_method(name)

    @dataclass(frozen=True)
    class Shallow(kind):
        def select(self, state, client, model, seeds):
            return shallow(model, "1/2") if client.tier == "0.5" else Cut.everything()

        def cut_for(self, state, budget, model):
            return shallow(model, "1/2") if budget.width != 1 else Cut.everything()

    result = run(Shallow(), model, image_data((6, 5, 7, 4)), "uniform-2", rounds=2, cohort=4)
    assert result.records[-1].cohort.refused == {}
    assert result.records[-1].tiers.keys() == {"0.5", "1"}


def test_random_and_rolling_units_keep_what_is_left_out(model):
    size = shallow(model, "1/2")
    rolled = window(model.groups, size, lambda _group: 1)
    drawn = random_units(model.groups, size, lambda _group: np.random.default_rng(0))
    assert rolled.absent == drawn.absent == size.absent
    assert len({rolled.tag, drawn.tag, size.tag}) == 3


def test_budgets_see_what_a_network_without_a_block_costs(model):
    cut = shallow(model)
    cost = model.cost(cut, Workload(4))
    for limit, needed in (("macs", cost.macs), ("params", cost.params), ("bytes", cost.bytes)):
        assert meets(model.costs, cut, Budget(**{limit: needed}))
        assert not meets(model.costs, cut, Budget(**{limit: needed - 1}))
    assert meets(model.costs, cut, Budget(memory=cost.training_memory), Workload(4))
    assert model.costs.of_limit("step_time", cut, Workload(2)) > 0


def test_a_mask_and_a_missing_block(model):
    names = ["first.0.weight", "tail.head.weight"]
    levels = Levels({name: torch.ones_like(model.weights()[name], dtype=torch.uint8) for name in names})
    levels.maps["first.0.weight"].view(-1)[:10] = 0
    cut = replace(shallow(model), mask=Mask(levels, 1))
    patch = model.cut(model.weights(), cut)
    assert "tail.head.weight" not in patch.values
    assert model.cost(cut).params == model.cost(shallow(model)).params - 10
    stored = sum(v.numel() * v.element_size() for v in patch.values.values())
    assert model.cost(cut).bytes == stored


def test_frames_of_partial_answers_without_a_block(model):
    (output,) = {axis.group for axis in model.groups.extents["early.bias"][0].axes}
    cut = shallow(model)
    sent = model.cut(model.weights(), cut)
    leased = LeasedFrame(Lease(frozenset(sent.values), cut, frozenset({output})), model)
    credited = cut.with_channels(model.groups, {**cut.channels, output: [0, 2]})
    data = b"".join(encode_patch(model.part(sent, credited)))
    assert decode_patch(data, leased).cut == credited


def test_pieces_of_different_depth_are_not_switched_between(model):
    weights = model.weights()
    patches = [model.cut(weights, cut) for cut in (Cut.everything(), shallow(model))]
    with pytest.raises(FedtailorError, match="different layers are different networks"):
        switchable(model, patches)
    network = switchable(model, [model.cut(weights, shallow(model))])
    batch = images(3).take(torch.arange(3))
    expected = model.forward(model.cut(weights, shallow(model)).values, shallow(model), batch)
    assert torch.equal(network.switch("1 shallow")(batch[0]), expected)
