"""One deployed network whose width is switched at run time."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedtailor
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.running.switchable import Switchable, switchable
from fedtailor.errors import FedtailorError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.models import build_model
from helpers import bits, cnn_model, image_data, images, tiny_cnn

X = images(6).columns[0]


@pytest.fixture(scope="module")
def run() -> fedtailor.Run:
    data = image_data((6,) * 5)
    settings = {"rounds": 2, "clients_per_round": 5, "engine": {"workers": 0}}
    return fedtailor.train(tiny_cnn(10, 15), data, "uniform-5", FjORD(), **settings)


@pytest.fixture
def network(run: fedtailor.Run) -> Switchable:
    return run.switchable()


def outputs(network: nn.Module) -> bytes:
    with torch.no_grad():
        return bits(network(X))


def test_every_width_answers_like_the_submodel_of_that_width(run, network):
    assert network.widths == ("1/5", "2/5", "3/5", "4/5", "1")
    assert network.width == "1"
    for width in (*network.widths, *reversed(network.widths), 0.2, 1, "3/5"):
        assert network.switch(width) is network
        assert outputs(network) == outputs(run.submodel(width))


def test_the_weights_are_kept_once(network):
    full = sum(value.numel() for value in network.parameters())
    assert full == sum(value.numel() for value in tiny_cnn(10, 15).parameters())
    assert not any(value.requires_grad for value in network.parameters())
    assert len([name for name in network.state_dict() if name.startswith("full.")]) == len(
        network.full.state_dict()
    )


def test_it_is_saved_loaded_copied_and_converted_like_any_module(run, network):
    expected = outputs(run.submodel(0.4))
    file = io.BytesIO()
    torch.save(network.switch(0.4), file)
    file.seek(0)
    assert outputs(torch.load(file, weights_only=False)) == expected
    assert outputs(copy.deepcopy(network)) == expected
    blank = copy.deepcopy(network)
    with torch.no_grad():
        for value in blank.state_dict().values():
            value.zero_()
    blank.switch(0.4)
    assert outputs(blank) != expected
    blank.load_state_dict(network.state_dict())  # takes effect at once, at the width it runs at
    assert outputs(blank) == expected
    double = copy.deepcopy(network).double()
    assert double(X.double()).dtype == torch.float64
    assert double.switch(0.8)(X.double()).dtype == torch.float64


def test_it_stays_in_evaluation_mode(network):
    network.train()
    before = outputs(network)
    assert outputs(network) == before


def test_an_unknown_width_is_refused_by_name(network):
    with pytest.raises(FedtailorError, match="unknown width '1/2'"):
        network.switch(0.5)


def test_recurrent_networks_switch_too():
    text = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    model = elastic(
        build_model("char-lstm", input_shape=(12,), num_classes=20, hidden=10), (text, text[:, 0])
    )
    method = FjORD()
    pieces = [method.deploy(method.init(model), Budget(width=w), model).patches[0] for w in method.candidates]
    network = switchable(model, pieces)
    with torch.no_grad():
        for piece in pieces:
            assert bits(network.switch(piece.cut.tag)(text)) == bits(model.build(piece)(text))


def test_pieces_that_share_no_weights_or_do_not_nest_are_refused():
    model, method = cnn_model(10, 15), FjORD()
    state = method.init(model)
    small, large = (method.deploy(state, Budget(width=w), model).patches[0] for w in ("2/5", "1"))
    other = replace(small, values={**small.values, "0.bias": small.values["0.bias"] + 1})
    with pytest.raises(FedtailorError, match="width 2/5 has a '0.bias' of its own"):
        switchable(model, [other, large])
    group = next(iter(small.cut.channels))
    crossing = model.cut(state.weights, replace(small.cut, channels={group: (3, 9)}))
    with pytest.raises(FedtailorError, match="do not lie inside one another"):
        switchable(model, [small, Patch(crossing.values, crossing.cut)])


def test_a_method_without_widths_has_one(run):
    plain = fedtailor.train(tiny_cnn(), image_data((8,)), "equal", FedAvg(), rounds=1, clients_per_round=1)
    assert plain.switchable().widths == ("1",)
