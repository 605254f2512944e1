"""Estimates of how the cosine changes with probabilities, against brute force; the sign that the paper has wrong."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch, gather
from fedtailor.elasticity.front_door import elastic
from fedtailor.methods.flado import alignment as module_under_test
from fedtailor.methods.flado.alignment import (
    Alignment,
    Slope,
    by_tensor,
    expected_slope,
    held_units,
    sketched,
    trained_names,
    unit_sums,
)
from fedtailor.methods.flado.flado import Flado
from fedtailor.methods.flado.following import followed
from fedtailor.methods.flado.sketch import cosine
from fedtailor.seeds import Seeds
from helpers import client, images, vectors

ROWS = 64
UNITS = 5  # of which the last is always drawn, so that no mask is empty


def batch_of(kind: str, count: int = 8):
    x, y = (images if kind == "pool" else vectors)(count).take(torch.arange(count))
    return x.double(), y


@cache
def model_of(kind: str):
    """One layer of drawn units, and behind it a layer with kinks of its own (none for tanh); in float64."""
    with Seeds(4).scope("aligned network"):
        if kind == "pool":
            module = nn.Sequential(
                nn.Conv2d(1, UNITS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                nn.Linear(4 * UNITS, 6), nn.ReLU(), nn.Linear(6, 4),
            )  # fmt: skip
            kept = "4"
        else:
            act = nn.Tanh if kind == "tanh" else nn.ReLU
            module = nn.Sequential(nn.Linear(5, UNITS), act(), nn.Linear(UNITS, 6), act(), nn.Linear(6, 4))
            kept = "2"
    return elastic(module.double(), batch_of(kind, 2), keep=[kept])


def some_direction(model):
    generator = torch.Generator().manual_seed(9)
    return {
        n: torch.randn(w.shape, dtype=torch.float64, generator=generator) for n, w in model.weights().items()
    }


def alignment_of(kind: str, method: Flado | None = None, direction=None, rows: int = ROWS) -> Alignment:
    method, model = method or Flado(scaling="none"), model_of(kind)
    task = method.assign(method.init(model), client(), model, Seeds(0))
    found = sketched(trained_names(model), direction or some_direction(model), rows, seed=3)
    return method.alignment(task, batch_of(kind), found, model)


def drawn_of(model, units) -> Cut:
    (group,) = model.groups.elastic
    return Cut.of(model.groups, {group: list(units)})


MASKS = [
    tuple(j for j in range(UNITS) if j == UNITS - 1 or bits[j])
    for bits in itertools.product((0, 1), repeat=UNITS - 1)
]


def chance(mask, p) -> float:
    return math.prod(p[j] if j in mask else 1 - p[j] for j in range(UNITS - 1))


@dataclass(frozen=True)
class Remembering(Alignment):
    """Every mask is asked for once."""

    known: dict[tuple[Cut, bool], Slope] = field(default_factory=dict)

    def slope(self, drawn, probabilities, whole=False):
        if (drawn, whole) not in self.known:
            self.known[drawn, whole] = super().slope(drawn, probabilities, whole)
        return self.known[drawn, whole]


def true_slope(alignment: Alignment, p: np.ndarray) -> np.ndarray:
    """Central differences of the mean over all masks, each weighted by its chance."""

    cuts = {mask: drawn_of(alignment.model, mask) for mask in MASKS}
    weights = {mask: alignment.at(cut) for mask, cut in cuts.items()}

    def mean(p: np.ndarray) -> float:
        total = 0.0
        for mask, cut in cuts.items():
            steps = alignment.steps(weights[mask], cut, torch.from_numpy(p))
            total += chance(mask, p) * alignment.compared(steps, cut)[0]
        return total

    slopes = np.zeros(UNITS)
    for unit in range(UNITS - 1):
        aside = np.zeros(UNITS)
        aside[unit] = 1e-5
        slopes[unit] = (mean(p + aside) - mean(p - aside)) / 2e-5
    return slopes


def mean_score(alignment: Alignment, p: np.ndarray) -> np.ndarray:
    """The mean of the estimate over all pairs of masks."""
    cached = Remembering(
        **{
            name: getattr(alignment, name)
            for name in ("model", "weights", "trajectory", "loss", "scaled", "slowed")
        }
    )
    cuts = [drawn_of(alignment.model, mask) for mask in MASKS]
    total = np.zeros(UNITS)
    for one, two in itertools.combinations_with_replacement(range(len(MASKS)), 2):
        times = chance(MASKS[one], p) * chance(MASKS[two], p) * (1 if one == two else 2)
        total += times * cached.score([cuts[one], cuts[two]], p)[0]
    return total


def angle(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine over the units that are drawn at all."""
    one, other = one[:-1], other[:-1]
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


FORMS = [
    {"scaling": "train", "slowed_filters": True},
    {"scaling": "train", "slowed_filters": False},
    {"scaling": "none", "slowed_filters": False},
]


@pytest.mark.parametrize("kind", ["tanh", "relu", "pool"])
@pytest.mark.parametrize("form", FORMS, ids=["scaled and slowed", "scaled", "plain"])
@pytest.mark.parametrize("around", [0.25, pytest.param(0.5, marks=pytest.mark.slow), 0.75])
def test_the_score_estimate_points_along_the_true_slope(kind, form, around):
    """In the mean over all draws, and in length too."""
    alignment = alignment_of(kind, Flado(**form))
    p = np.append(around + np.linspace(-0.05, 0.05, UNITS - 1), 1.0)
    truth = true_slope(alignment, p)
    assert np.abs(truth).max() > 1e-3
    found = mean_score(alignment, p)
    assert angle(found, truth) >= 0.95
    assert found[:-1] == pytest.approx(truth[:-1], abs=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=["scaled and slowed", "scaled", "plain"])
def test_the_slopes_at_a_mask_are_the_derivatives_of_the_cosine(form):
    """Along the path and for every gate, held by the mask or not, against central differences."""
    alignment = alignment_of("tanh", Flado(**form))
    model, p = alignment.model, np.linspace(0.3, 0.8, UNITS)
    drawn = drawn_of(model, [0, 2, 4])
    found = alignment.slope(drawn, p, whole=True)
    small = alignment.slope(drawn, p)
    assert small.value == pytest.approx(found.value, abs=1e-12)
    assert small.path == pytest.approx(found.path, abs=1e-10)
    mask = torch.from_numpy(held_units(model, drawn))

    def value(p: np.ndarray, mask: torch.Tensor) -> float:
        steps = alignment.steps(model.weights(), Cut.everything(), torch.from_numpy(p), mask)
        sketch = alignment.trajectory.transform([-steps[n] for n in trained_names(model)])
        return cosine(alignment.trajectory.sketch, sketch)

    assert found.value == pytest.approx(value(p, mask), abs=1e-12)
    for unit in range(UNITS):
        aside = np.zeros(UNITS)
        aside[unit] = 1e-5
        gate = (value(p, mask + torch.from_numpy(aside)) - value(p, mask - torch.from_numpy(aside))) / 2e-5
        path = (value(p + aside, mask) - value(p - aside, mask)) / 2e-5
        assert found.gates[unit] == pytest.approx(gate, abs=1e-6)
        assert found.path[unit] == pytest.approx(path, abs=1e-6)
    assert np.abs(found.gates[[1, 3]]).max() > 1e-4  # the full network says something about the others too


@pytest.mark.parametrize("form", FORMS, ids=["scaled and slowed", "scaled", "plain"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_layer_without_a_second_derivative_is_differenced(form, whole, monkeypatch):
    """What ``torch.autograd`` says of such layers is taken for an answer, nothing else is."""
    alignment, p = alignment_of("tanh", Flado(**form)), np.linspace(0.3, 0.8, UNITS)
    drawn = drawn_of(alignment.model, [0, 2, 4])
    exact = alignment.slope(drawn, p, whole)

    def refuses(words):
        def pulled(*_arguments):
            raise RuntimeError(words)

        return pulled

    monkeypatch.setattr(module_under_test, "_pulled", refuses("the derivative for 'f' is not implemented"))
    found = alignment.slope(drawn, p, whole)
    assert found.path == pytest.approx(exact.path, abs=1e-5)
    assert found.gates == pytest.approx(exact.gates, abs=1e-5)
    monkeypatch.setattr(module_under_test, "_pulled", refuses("out of memory"))
    if alignment.scaled or alignment.slowed or whole:
        with pytest.raises(RuntimeError, match="out of memory"):
            alignment.slope(drawn, p, whole)


def descent(kind: str) -> dict[str, torch.Tensor]:
    """-g of the full network: where the client itself wants to go."""
    alignment, model = alignment_of(kind), model_of(kind)
    steps = alignment.steps(model.weights(), Cut.everything(), torch.ones(UNITS, dtype=torch.float64))
    return {name: -value for name, value in steps.items()}


def test_the_sign_is_that_of_descent():
    """A client whose own descent is the trajectory has a cosine of 1, not -1."""
    alignment = alignment_of("tanh", direction=descent("tanh"))
    assert alignment.slope(Cut.everything(), np.ones(UNITS)).value == pytest.approx(1)


@pytest.mark.parametrize("how", ["surrogate", "score", "hessian"])
def test_aligned_units_rise_under_every_estimator(how):
    """The trajectory is the client's descent on some of the units: these must gain on the others."""
    direction = descent("tanh")
    for name in direction:
        if name in ("0.weight", "0.bias"):
            direction[name][2:] = 0
        else:
            direction[name] = torch.zeros_like(direction[name])
    alignment = alignment_of("tanh", Flado(slowed_filters=True), direction, rows=512)
    p, generator = np.full(UNITS, 0.5), np.random.default_rng(0)
    total = np.zeros(UNITS)
    for _ in range(1 if how == "surrogate" else 60):
        drawn = [np.flatnonzero(generator.random(UNITS) < 0.5).tolist() or [0] for _ in range(2)]
        total += alignment.estimate(how, p, [drawn_of(alignment.model, units) for units in drawn])[0]
    assert total[:2].mean() > total[2:].mean()


@pytest.mark.parametrize("power", [-1, 0, 1])
def test_the_expected_slope_is_the_derivative_of_its_closed_form(power):
    generator = np.random.default_rng(2)
    p, along, squares = generator.uniform(0.2, 0.9, 4), generator.normal(size=5), generator.uniform(0.1, 1, 5)

    def closed(q: np.ndarray) -> float:
        grown = (q / p) ** power  # u of a drawn unit, as seen at p
        aligned = (q * grown) @ along[:-1] + along[-1]
        return float(aligned / np.sqrt((q * grown**2) @ squares[:-1] + squares[-1]))

    slope = expected_slope(p, along, squares, power)
    for unit in range(4):
        aside = np.zeros(4)
        aside[unit] = 1e-6
        assert slope[unit] == pytest.approx((closed(p + aside) - closed(p - aside)) / 2e-6, abs=1e-6)


def test_an_update_says_what_its_units_did():
    """One step of three drawn units: their products with the trajectory and their squares, and those of all others."""
    method, model = Flado(), model_of("relu")
    toward, before, p = some_direction(model), model.weights(), np.linspace(0.3, 0.8, UNITS)
    alignment, drawn = alignment_of("relu", method, toward), drawn_of(model, [0, 1, 4])
    step = alignment.steps(alignment.at(drawn), drawn, torch.from_numpy(p))
    whole = alignment._split(torch.cat([toward[n].reshape(-1) for n in trained_names(model)]), drawn)
    along = unit_sums({n: -g * whole[n] for n, g in step.items()}, drawn, model)
    squares = unit_sums({n: g * g for n, g in step.items()}, drawn, model)
    after = model.place(
        before, Patch({n: gather(before[n], model.table(drawn)[n]) - g for n, g in step.items()}, drawn)
    )
    length = sum(float(part.square().sum()) for part in toward.values()) ** 0.5
    slope, cosine = followed(before, after, toward, length, p, 1, method.power, model)
    often = np.append(p, 1)
    assert slope == pytest.approx(expected_slope(p, along / often, squares / often, method.power) / length)
    assert slope[[2, 3]].tolist() == [0, 0]  # never drawn: no news
    assert np.abs(slope[[0, 1, 4]]).min() > 0
    flat = [
        torch.cat([(after[n] - before[n]).reshape(-1) for n in toward]),
        torch.cat([v.reshape(-1) for v in toward.values()]),
    ]
    assert cosine == pytest.approx(float(torch.cosine_similarity(*flat, dim=0)))


def test_a_vector_goes_back_to_its_tensors():
    model = model_of("relu")
    weights = model.weights()
    vector = torch.cat([weights[name].reshape(-1) for name in trained_names(model)])
    assert all(torch.equal(part, weights[name]) for name, part in by_tensor(vector, weights, model).items())
