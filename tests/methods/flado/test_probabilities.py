"""How probabilities move: at the budget's cost, by Adam's rule, to where the floor is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.expected import expected_macs, project, uniform_probability
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.methods.flado.flado import Flado
from fedtailor.methods.flado.probabilities import Known, free_of_cost, prices
from helpers import mlp_model


def test_a_budget_is_kept_to_first_order_and_exactly_after_projection():
    model, method = mlp_model(hidden=5), Flado(alignment_step=0.05)
    budget = Budget(macs=0.5)
    p = method.uniform(budget, model)
    slope = np.array([1.0, 0.5, -0.2, 0.3, -1.0])
    free = free_of_cost(slope, p, model)
    assert float(prices(p, model) @ free) == pytest.approx(0, abs=1e-6 * np.abs(prices(p, model)).max())
    moved = method.moved({"probabilities": torch.from_numpy(p)}, slope, budget, model)[
        "probabilities"
    ].numpy()
    assert (np.sign(moved - p) == np.sign(free)).all()
    assert np.abs(moved - p).max() <= 2 * 0.05
    cost = expected_macs(model.costs, model.units.by_group(moved))
    assert cost == pytest.approx(0.5 * model.cost(Cut.everything()).macs, rel=1e-9)
    start = np.full(model.units.total, uniform_probability(model.costs, Budget(macs=0.3)))
    assert np.abs(project(model.costs, start, Budget(macs=0.3)) - start).max() < 1e-12


def test_a_unit_moves_as_far_as_its_estimates_agree_whatever_their_size():
    draws = np.random.default_rng(0)
    known = Known.of({}, 3)
    for _ in range(300):
        known = Known.of(known.joined(np.array([1e-6, 5 * draws.standard_normal(), 0.0]), 0.9).memory, 3)
    steady, noisy, silent = known.direction(0.9)
    assert steady == pytest.approx(1)
    assert abs(noisy) < 0.6
    assert silent == 0


def test_knowing_the_slope_is_adams_rule():
    slopes = np.random.default_rng(1).standard_normal((7, 4))
    value = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([value], lr=1.0, betas=(0.9, 0.99), eps=0.0, maximize=True)
    known = Known.of({}, 4)
    for slope in slopes:
        before = value.detach().clone()
        value.grad = torch.from_numpy(slope)
        adam.step()
        known = known.joined(slope, 0.9)
        assert known.direction(0.9) == pytest.approx((value.detach() - before).numpy(), rel=1e-9)


def test_the_floor_leaves_small_budgets_a_choice():
    model = mlp_model(hidden=40)
    generous, narrow = Budget(macs=0.5), Budget(macs=0.12)
    uniform = Flado().probability(narrow, model)
    assert uniform < 0.2
    assert Flado().floor(generous, model) == 0.1
    assert Flado().floor(narrow, model) == uniform / 2
