"""Every method of Flado's comparison at the same FLOPs: p solved for r_c."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.methods.federated_dropout import EFD
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.methods.fjord.shares import mean_shares
from fedtailor.methods.flado.flado import Flado
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.methods.uniprob import UniProb
from fedtailor.seeds import Seeds
from helpers import client, cnn_model, images, tiny_cnn

LOCAL = LocalTraining(batch_size=1)
STEPS = 600


def share_of_full(method, share: float) -> float:
    """The work of a step as a share of a dense step's."""
    model = cnn_model(32, 48)
    who = replace(client(examples=STEPS), budget=Budget(macs=share))
    task = method.assign(method.init(model), who, model, Seeds(0))
    return method.work(task, model).macs / (3 * model.cost(Cut.everything()).macs)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.64])
def test_every_method_spends_what_its_client_may_spend(share):
    assert share_of_full(Flado(LOCAL), share) == pytest.approx(share, rel=1e-3)
    assert share_of_full(UniProb(LOCAL), share) == pytest.approx(share, rel=1e-3)
    for method in (HeteroFL(LOCAL), EFD(LOCAL)):  # whole channels: a little is left
        assert 0.85 * share < share_of_full(method, share) <= share
    ordered = FjORD(LOCAL, "averaged", widths="uniform-20", distillation=False, mean_budget=True)
    assert share_of_full(ordered, share) == pytest.approx(share, rel=0.1)  # a mean over drawn steps


@pytest.mark.parametrize("allowed", [1, 1.2, 1.5, 2, 3, 3.3, 4, 5, 6])
def test_shares_of_widths_have_the_mean_that_was_asked_for(allowed):
    costs = [1.0, 2.0, 6.0]
    shares = mean_shares(costs, allowed, Budget(macs=6))
    assert sum(shares) == pytest.approx(1)
    assert sum(share * cost for share, cost in zip(shares, costs, strict=True)) == pytest.approx(allowed)
    assert min(shares) >= 0


def test_more_than_the_largest_is_the_largest_and_less_than_the_smallest_is_refused():
    assert mean_shares([1.0, 2.0], 9.0, Budget(macs=9)) == (0.0, 1.0)
    with pytest.raises(FedtailorError, match="the smallest feasible share is 0.5"):
        mean_shares([1.0, 2.0], 0.5, Budget(macs=1))


def test_a_mean_budget_needs_plain_draws():
    with pytest.raises(FedtailorError, match="method.mean_budget.*set method.distillation = false"):
        FjORD(mean_budget=True)


def test_shares_are_found_once_for_a_model_and_do_not_keep_it_alive():
    method = FjORD(LOCAL, "averaged", widths="uniform-20", distillation=False, mean_budget=True)
    model = elastic(tiny_cnn(8, 8), images(2).take(torch.arange(2)))  # of this test alone
    assert method.shares_at(Budget(macs=0.5), model) is method.shares_at(Budget(macs=0.5), model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
