"""FedRolex: the rolling window, and which weights it ever touches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import kept, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.methods.fedrolex import FedRolex
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, differing, held_mask, image_data, mlp_model, run

LOCAL = LocalTraining(lr=0.1, momentum=0.9, batch_size=4, clip_norm=1.0)


def square(width: int, second: int | None = None):
    """Two hidden layers; the weight between them is (second, width)."""
    second = second or width
    module = nn.Sequential(
        nn.Linear(3, width), nn.ReLU(), nn.Linear(width, second), nn.ReLU(), nn.Linear(second, 2)
    )
    return elastic(module, (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)))


def windows(model, width, rounds: int, phase: str = "lockstep") -> list[Cut]:
    method = FedRolex(phase=phase)
    state = method.init(model)
    return [
        method.select(replace(state, round=round), client(width=width), model, Seeds(0))
        for round in range(rounds)
    ]


def test_full_width_is_heterofl_level_a_bit_for_bit():
    model, data = cnn_model(), image_data((6, 6))
    ours = run(FedRolex(LOCAL), model, data, rounds=3, every=1).state.weights
    assert not differing(ours, run(HeteroFL(LOCAL), model, data, rounds=3, every=1).state.weights)


@pytest.mark.parametrize("phase", ["lockstep", "independent"])
@pytest.mark.parametrize("width", ["1/4", "1/3", "0.7"])
def test_every_unit_is_selected_equally_often_in_k_rounds(phase, width):
    model = mlp_model(hidden=12)
    (group,) = model.groups.elastic
    for start in (0, 12):
        chosen = windows(model, width, start + 12, phase)[start:]
        times = Counter(unit for cut in chosen for unit in cut.channels[group])
        assert times == dict.fromkeys(range(12), kept(Fraction(width), 12))


def test_first_window_is_heterofls_prefix_and_it_moves_by_one():
    model = mlp_model(hidden=8)
    (group,) = model.groups.elastic
    assert windows(model, 0.5, 1)[0] == prefix(model.groups, Fraction(1, 2))
    assert [list(cut.channels[group]) for cut in windows(model, 0.5, 6)[1::4]] == [[1, 2, 3, 4], [0, 5, 6, 7]]


def test_layers_of_equal_width_share_the_window_in_lockstep_only():
    model = square(16)
    first, second = model.groups.elastic
    assert all(cut.channels[first] == cut.channels[second] for cut in windows(model, 0.25, 16))
    assert any(cut.channels[first] != cut.channels[second] for cut in windows(model, 0.25, 16, "independent"))


def coverage(model, width, rounds: int, phase: str) -> float:
    """The share of the middle layer's weights that some window has touched."""
    touched = torch.zeros_like(model.weights()["2.weight"], dtype=torch.bool)
    for cut in windows(model, width, rounds, phase):
        touched |= held_mask(model, cut, "2.weight")
    return float(touched.double().mean())


@pytest.mark.parametrize(
    ("shape", "width", "expected"),
    [
        ((64, 64), "1/4", 0.484),
        ((64, 64), "1/2", 0.984),
        ((64, 64), "1/16", 0.109),
        ((64, 128), "1/4", 0.734),
    ],
)
def test_lockstep_leaves_weights_untouched_as_specified(shape, width, expected):
    model = square(*shape)
    assert coverage(model, width, 128, "lockstep") == pytest.approx(expected, abs=5e-4)


def test_independent_phases_reach_almost_every_weight():
    assert coverage(square(64), "1/4", 128, "independent") > 0.99


def test_coordinates_outside_the_window_keep_their_bits():
    model, data = cnn_model(first=8, second=12), image_data((6, 6))
    method = FedRolex(LOCAL)
    before = method.init(model).weights
    after = run(method, model, data, "equal-0.5").state.weights
    cut = windows(model, 0.5, 1)[0]
    for name in model.trainable:
        inside = held_mask(model, cut, name)
        assert torch.equal(before[name][~inside], after[name][~inside])


def test_unknown_phase_is_named():
    with pytest.raises(FedtailorError, match="unknown phase 'random'"):
        FedRolex(phase="random")
