"""``widths = "fleet"``: methods of nested networks train what the tiers of their fleet can run."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import fedtailor
from fedtailor.config import make_config
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.methods.flanc.flanc import FLANC
from tests.helpers import differing, vector_data

TIERS = [{"name": "small", "width": "1/3", "share": 1}, {"name": "large", "width": 1, "share": 1}]
QUICK = {"rounds": 2, "engine": {"workers": 0}, "progress": False}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", ["fjord", "flanc"])
def test_the_same_as_the_list_of_the_fleets_widths(name):
    runs = [
        fedtailor.train(network(), vector_data(), TIERS, {"name": name, "widths": widths}, **QUICK)
        for widths in ("fleet", ["1/3", 1])
    ]
    assert runs[0].method.candidates == (Fraction(1, 3), 1)
    assert differing(runs[0].state.weights, runs[1].state.weights) == set()


@pytest.mark.parametrize("method", [FjORD(widths="fleet"), FLANC(widths="fleet")])
def test_before_the_fleet_is_known_there_is_no_list(method):
    with pytest.raises(FedtailorError, match='method.widths = "fleet": expected a list here'):
        _ = method.candidates


def test_a_tier_with_another_limit_gets_the_largest_width_in_hundredths():
    method = FjORD(widths="fleet")
    model = fedtailor.elastic(nn.Sequential(nn.Linear(8, 70), nn.ReLU(), nn.Linear(70, 4)), torch.randn(2, 8))
    cost = {width: model.cost(method.cut_at(Fraction(width, 100), model)).macs for width in (41, 42)}
    found = method.for_fleet([Budget(macs=cost[42] - 1), Budget(width=1)], model)
    assert cost[41] < cost[42]
    assert found.candidates == (Fraction(41, 100), 1)
    assert found.for_fleet([Budget(width=1)], model) is found  # settled once


def test_probabilities_want_a_list():
    table = {"name": "fjord", "widths": "fleet", "probabilities": [0.5, 0.5]}
    with pytest.raises(FedtailorError, match='expected none with method.widths = "fleet"'):
        make_config({"method": table})
    with pytest.raises(
        FedtailorError, match="expected uniform-k, such as uniform-5, a list of widths, or fleet"
    ):
        make_config({"method": {"name": "fjord", "widths": "flet"}})
