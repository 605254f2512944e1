"""A small network without a run: ``fedtailor.elastic(module, batch).submodel(...)``."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import fedtailor
from fedtailor import Budget, FedtailorError
from fedtailor.elasticity.cutting.selections import prefix
from helpers import images, tiny_cnn


@pytest.fixture(scope="module")
def model():
    return fedtailor.elastic(tiny_cnn(8, 8), images(2).take(torch.arange(2)))


@pytest.mark.parametrize("width", [0.5, "1/2", Fraction(1, 2), Budget(width=0.5)])
def test_a_width_in_any_spelling(model, width):
    small = model.submodel(width)
    assert type(small) is nn.Sequential
    assert [tuple(layer.weight.shape[:2]) for layer in (small[0], small[4])] == [(4, 1), (4, 4)]
    assert torch.equal(small[0].weight, model.module[0].weight[:4])
    assert small(images(3).take(torch.arange(3))[0]).shape == (3, 4)


def test_a_budget_gives_the_widest_piece_that_it_allows(model):
    macs = {width: model.cost(prefix(model.groups, Fraction(width, 8))).macs for width in range(1, 9)}
    for width in range(1, 8):
        assert model.submodel(Budget(macs=macs[width]))[0].weight.shape[0] == width
        assert model.submodel(Budget(macs=macs[width + 1] - 1))[0].weight.shape[0] == width


def test_the_whole_module_is_a_copy(model):
    whole = model.submodel(1)
    with torch.no_grad():
        whole[0].weight.zero_()
    assert bool(model.module[0].weight.any())


@pytest.mark.parametrize("width", [0, 1.5, "half", None, True])
def test_what_is_no_width_is_refused_by_name(model, width):
    with pytest.raises(FedtailorError, match="width"):
        model.submodel(width)
