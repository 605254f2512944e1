"""Copies that steps train on: filled with what is held at the moment, put back where they belong."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fedtailor.client import copies
from fedtailor.client.copies import Copies, Places
from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import gather
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.seeds import Seeds
from helpers import bits, client, cnn_model, image_data

EVERYTHING = Cut.everything()


@pytest.fixture
def model():
    return cnn_model(10, 15)


def test_copies_follow_what_is_held(model):
    held = {name: value.clone() for name, value in model.weights().items()}
    cut = prefix(model.groups, Fraction(2, 5))
    table = model.inside(EVERYTHING, cut)
    places = Places(held).at(cut, table)
    assert places is not None
    leaves = {name: gather(held[name], where) for name, where in table.items()}
    found = Copies(leaves, places)
    for value in held.values():
        value.add_(1)
    assert found.filled() is leaves
    assert all(bits(leaves[name]) == bits(gather(held[name], where)) for name, where in table.items())
    for view in places.values():
        view.fill_(7)
    assert all(bool((gather(held[name], where) == 7).all()) for name, where in table.items())


def test_cuts_that_are_not_likely_to_come_again_have_no_places(model):
    places = Places(model.weights())
    group, count = next(iter(model.groups.counts.items()))
    listed = Cut.of(model.groups, {group: list(range(1, count, 2))})
    assert places.at(listed, model.inside(EVERYTHING, listed)) is None
    cuts = [prefix(model.groups, Fraction(number, 15)) for number in range(1, 12)]
    kept = [places.at(cut, model.inside(EVERYTHING, cut)) for cut in cuts]
    assert [each is not None for each in kept] == [True] * copies.MOST_CUTS + [False] * 3
    assert places.at(cuts[0], model.inside(EVERYTHING, cuts[0])) is kept[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_the_same_bits_without_them(model, monkeypatch, momentum):
    method = FjORD(LocalTraining(batch_size=4, lr=0.1, momentum=momentum))
    task = method.assign(method.init(model), client(0, "1", 8), model, Seeds(0))
    batch = image_data((8,)).train.take(torch.arange(8))

    def trained():
        steps = LocalSteps(method, task, model)
        for step in range(12):
            steps.take(step, batch)
        return len(steps.copies), {name: bits(value) for name, value in steps.trained().values.items()}

    used, ours = trained()
    monkeypatch.setattr(copies, "MOST_CUTS", 0)
    unused, plain = trained()
    assert (used > 1, unused) == (True, 0)
    assert ours == plain


def test_two_networks_of_one_step_with_the_same_cut_have_copies_of_their_own(model):
    method = FjORD(LocalTraining(batch_size=4))
    task = method.assign(method.init(model), client(0, "1", 8), model, Seeds(0))
    steps, cut = LocalSteps(method, task, model), prefix(model.groups, Fraction(2, 5))
    first, again, later = steps._leaves(cut), steps._leaves(cut, again=True), steps._leaves(cut)
    narrower = [name for name, value in steps.weights.items() if first[name].shape != value.shape]
    assert narrower
    assert all(first[name] is not again[name] and first[name] is later[name] for name in narrower)
