"""The alignment gradient against brute force, and the two errors of the paper's algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.methods.flado.alignment import Alignment, held_units, sketched, trained_names
from fedtailor.methods.flado.sketch import cosine
from helpers import vectors

ROWS = 64


def tanh_net() -> nn.Module:
    """Smooth, so that differences converge; in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def batch_of(count: int = 8):
    x, y = vectors(count).take(torch.arange(count))
    return x.double(), y


def alignment_of(model, direction, rows: int = ROWS) -> Alignment:
    batch = batch_of()

    def loss(weights, cut):
        return model.objective.loss(model.forward(weights, cut, batch, mode="train"), batch)

    trajectory = sketched(trained_names(model), direction, rows, seed=3)
    return Alignment(model, model.weights(), trajectory, loss)


def some_direction(model):
    generator = torch.Generator().manual_seed(9)
    return {
        n: torch.randn(w.shape, dtype=torch.float64, generator=generator) for n, w in model.weights().items()
    }


def setting():
    model = elastic(tanh_net(), batch_of(2))
    drawn = Cut.of(model.groups, {group: [0, 2, 3, 5] for group in model.groups.elastic})
    return model, alignment_of(model, some_direction(model)), drawn


def brute_force(alignment: Alignment, gates: torch.Tensor) -> float:
    """c at any gates, with everything written down: gated weights, gradient, transform, cosine."""
    names = trained_names(alignment.model)
    leaves = {n: w.clone().requires_grad_() for n, w in alignment.weights.items()}
    cut = Cut.everything()
    loss = alignment.loss(alignment.model.units.gated(leaves, gates, cut), cut)
    gradient = torch.autograd.grad(loss, [leaves[n] for n in names])
    sketch = alignment.trajectory.transform([-g for g in gradient])
    return cosine(alignment.trajectory.sketch, sketch)


def test_the_hessian_estimate_is_the_derivative_of_the_cosine():
    """Every unit, held by the mask or not, against central differences of the cosine itself."""
    model, alignment, drawn = setting()
    slope, value = alignment.hessian(drawn, whole=True)
    mask = torch.from_numpy(held_units(model, drawn))
    assert value == pytest.approx(brute_force(alignment, mask), abs=1e-12)
    step = 1e-5
    for unit in range(model.units.total):
        aside = torch.zeros_like(mask)
        aside[unit] = step
        difference = brute_force(alignment, mask + aside) - brute_force(alignment, mask - aside)
        assert slope[unit] == pytest.approx(difference / (2 * step), abs=1e-6)
    assert np.abs(slope).max() > 1e-3


def test_a_drawn_network_gives_what_the_masked_full_one_gives_its_units():
    model, alignment, drawn = setting()
    (small, value), (large, same) = alignment.hessian(drawn), alignment.hessian(drawn, whole=True)
    held = held_units(model, drawn) == 1
    assert value == pytest.approx(same, abs=1e-12)
    assert small[held] == pytest.approx(large[held], abs=1e-6)
    assert not small[~held].any()
    assert np.abs(large[~held]).max() > 1e-4  # the full network says something about the others too


def test_a_gradient_under_a_mask_is_that_of_the_small_network():
    model, alignment, drawn = setting()
    masked, _ = alignment.gradients(
        alignment.at(Cut.everything()), Cut.everything(), held_units(model, drawn)
    )
    small, _ = alignment.gradients(alignment.at(drawn), drawn)
    placed = dict(zip(trained_names(model), alignment._placed(small, drawn), strict=True))
    for name, value in masked.items():
        assert torch.allclose(value, placed[name], atol=1e-12)


def descent(model) -> dict[str, torch.Tensor]:
    """-g of the full network: where the client itself wants to go."""
    gradient, _ = alignment_of(model, some_direction(model)).gradients(model.weights(), Cut.everything())
    return {name: -value for name, value in gradient.items()}


def test_the_sign_is_that_of_descent():
    """A client whose own descent is the trajectory has a cosine of 1, not -1."""
    model = elastic(tanh_net(), batch_of(2))
    assert alignment_of(model, descent(model)).cosine_at(Cut.everything()) == pytest.approx(1)


@pytest.mark.parametrize("how", ["surrogate", "score"])
def test_aligned_units_rise_under_every_estimator(how):
    """The trajectory is the client's descent on half of the units: these must gain on the others."""
    model = elastic(tanh_net(), batch_of(2))
    group = model.groups.elastic[0]
    direction = descent(model)
    for name in direction:
        kept = name in ("0.weight", "0.bias")
        direction[name] = direction[name].clone() if kept else torch.zeros_like(direction[name])
        if kept:
            direction[name][3:] = 0
    alignment = alignment_of(model, direction, rows=4096)
    probabilities = np.full(model.units.total, 0.5)
    total = np.zeros(model.units.total)
    generator = np.random.default_rng(0)
    for _ in range(1 if how == "surrogate" else 150):

        def draw(_number: int) -> Cut:
            keep = {g: np.flatnonzero(generator.random(w) < 0.5) for g, w in model.groups.counts.items()}
            return Cut.of(model.groups, {g: keep[g].tolist() or [0] for g in model.groups.elastic})

        total += alignment.estimate(how, probabilities, draw, whole=True)[0]
    slope = model.units.by_group(total)[group]
    assert slope[:3].mean() > slope[3:].mean()


def test_the_surrogate_is_the_derivative_of_its_closed_form():
    model, alignment, _ = setting()
    probabilities = np.linspace(0.2, 0.9, model.units.total)
    slope, _ = alignment.surrogate(Cut.everything(), probabilities)
    gradient, _ = alignment.gradients(model.weights(), Cut.everything())
    back = alignment._split(
        alignment.trajectory.transform.adjoint(alignment.trajectory.sketch), Cut.everything()
    )

    def closed(p: np.ndarray) -> float:
        along = square = 0.0
        first, second = torch.from_numpy(p[:7]), torch.from_numpy(p[7:])
        rows = {"0": first, "2": second, "4": torch.ones(4, dtype=torch.float64)}
        for name, g in gradient.items():
            factor = rows[name[0]].view(-1, *(1,) * (g.dim() - 1))
            along -= float((factor * back[name] * g).sum())
            square += float((factor * g * g).sum())
        return along / square**0.5 / float(alignment.trajectory.sketch.norm())

    for unit in range(model.units.total):
        aside = np.zeros(model.units.total)
        aside[unit] = 1e-6
        difference = closed(probabilities + aside) - closed(probabilities - aside)
        assert slope[unit] == pytest.approx(difference / 2e-6, abs=1e-6)
