"""Every module of the zoo, over random cuts: a piece computes what the masked full module computes."""

from __future__ import annotations

import copy

import pytest
import torch

from elasticity.odd_constructions import ZOO
from elasticity.oracle import kept_statistics, masked_module
from elasticity.traced import case, close, run, some_loss, tensors
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.explain import elastic_share

SEEDS = range(4)


def test_the_zoo_is_large_enough():
    assert len(ZOO) >= 24


@pytest.mark.parametrize("name", ZOO)
def test_a_piece_is_the_masked_full_module(name):
    this = case(name)
    for seed in SEEDS:
        cut = this.cut(seed)
        small = this.model.extract(this.model.weights(), cut)
        masked = masked_module(this.module, this.model.groups, cut, name)
        for training in (False, True):
            with torch.no_grad():
                mine = run(small.train(training), this.batch)
                with kept_statistics():
                    theirs = run(masked.train(training), this.batch)
            close(mine, theirs, 1e-10)


@pytest.mark.parametrize("name", ZOO)
def test_gradients_of_the_functional_call_are_those_of_the_extracted_module(name):
    this = case(name)
    for seed in SEEDS[:2]:
        cut = this.cut(seed)
        weights = this.model.weights()
        leaves = {
            key: value.requires_grad_(key in this.model.trainable)
            for key, value in this.model.cut(weights, cut).values.items()
        }
        outputs = tensors(this.model.forward(leaves, cut, copy.deepcopy(this.batch), mode="train"))
        some_loss(outputs).backward()
        small = this.model.extract(weights, cut).train()
        others = run(small, this.batch)
        some_loss(others).backward()
        close(outputs, others, 1e-12)
        compared = 0
        for key, parameter in small.named_parameters():
            if parameter.grad is None:
                assert leaves[key].grad is None or not leaves[key].grad.any()
                continue
            close([leaves[key].grad], [parameter.grad], 1e-12)
            compared += 1
        assert compared


@pytest.mark.parametrize("name", ZOO)
def test_extract_then_place_leaves_the_global_model_bit_identical(name):
    this = case(name)
    weights = this.model.weights()
    for seed in SEEDS:
        cut = this.cut(seed)
        small = this.model.extract(weights, cut)
        held = dict([*small.named_parameters(), *small.named_buffers()])
        values = {key: held[key].detach() for key in weights}
        placed = this.model.place(weights, Patch(values, cut))
        assert placed.keys() == weights.keys()
        assert all(torch.equal(placed[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", ZOO)
def test_single_precision_is_as_good_as_it_can_be(name):
    this = case(name, torch.float32)
    cut = this.cut(0)
    small = this.model.extract(this.model.weights(), cut).eval()
    with torch.no_grad():
        mine = run(small, this.batch)
        with kept_statistics():
            theirs = run(masked_module(this.module, this.model.groups, cut, name).eval(), this.batch)
    close(mine, theirs, 1e-5)


@pytest.mark.parametrize("name", ZOO)
def test_most_parameters_are_elastic_and_pieces_are_of_the_expected_class(name):
    this, entry = case(name), ZOO[name]
    assert elastic_share(this.model) >= entry.share
    assert this.model.own_class == entry.own_class
    small = this.model.extract(this.model.weights(), this.cut(0))
    assert (type(small) is type(this.module)) == entry.own_class
