"""``widths = "fleet"``: methods of nested networks train what the tiers of their fleet can run."""

from __future__ import annotations

import warnings
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


@pytest.mark.parametrize(("name", "smallest"), [("fjord", "1/3"), ("tailor", "1/3"), ("flanc", "1/4")])
def test_the_same_as_the_list_of_the_fleets_widths(name, smallest):
    """FLANC's in eighths, of which its layers are composed."""
    runs = [
        fedtailor.train(network(), vector_data(), TIERS, {"name": name, "widths": widths}, **QUICK)
        for widths in ("fleet", [smallest, 1])
    ]
    assert runs[0].method.candidates == (Fraction(smallest), 1)
    assert differing(runs[0].state.weights, runs[1].state.weights) == set()


def test_flancs_fragments_stay_as_large_as_they_may_be():
    """Hundredths would have no common divisor but one, and the basis that all widths share would be next to nothing."""
    model = fedtailor.elastic(
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
        (torch.randn(2, 8), torch.arange(2)),
    )
    budgets = [Budget(macs=0.1), Budget(width=Fraction(31, 64)), Budget(macs=0.6), Budget(width=1)]
    found = FLANC(widths="fleet").for_fleet(budgets, model)
    assert all((8 * width).denominator == 1 for width in found.candidates)
    assert [each.fragment for each in found.plan(model).composed] == [8]
    tiny = FLANC(widths="fleet").for_fleet([Budget(width=Fraction(1, 16)), Budget(width=1)], model)
    assert tiny.candidates == (Fraction(1, 16), 1)


def test_a_range_without_its_smallest_devices_has_a_width_for_the_least_that_is_left(tmp_path):
    data, fleet = {"dataset": "digits", "clients": 12, "limit": 240}, "flops-0.02-0.64"
    for method in ("fjord:widths=fleet", "tailor"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who takes no part is told
            run = fedtailor.train(
                "mlp", data, {"name": fleet, "too_small": "skip"}, method, clients_per_round=12, **QUICK
            )
        least = run.fleet.least_macs
        assert (
            least is None
            or run.method.candidates[0] <= run.method.cut_for(run.state, Budget(macs=least), run.model).width
        )
        assert len(run.history) == 2


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
