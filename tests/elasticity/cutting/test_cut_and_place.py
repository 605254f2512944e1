"""Index arithmetic: cutting and placing are exact inverses on what is held, and widths are exact."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticity.traced import case
from fedtailor.elasticity.check import random_cut
from fedtailor.elasticity.cutting.cut import Cut, as_units
from fedtailor.elasticity.cutting.patch import Patch, kept_positions, where_of
from fedtailor.elasticity.cutting.selections import as_width, kept, prefix
from fedtailor.elasticity.groups import Axis, Extent
from fedtailor.errors import FedtailorError

NAMES = [
    "ResNet",
    "DenseNet",
    "ShuffleNet",
    "BidirectionalGRU",
    "CrossAttention",
    "TiedLanguageModel",
    "OptionAResNet",
]


@given(st.sampled_from(NAMES), st.integers(0, 10**6))
def test_place_is_the_inverse_of_cut(name, seed):
    """Bit for bit: what was cut goes back to where it was, and nothing else moves."""
    model = case(name).model
    cut = random_cut(model.groups, np.random.default_rng(seed))
    weights = model.weights()
    patch = model.cut(weights, cut)
    assert all(torch.equal(model.place(weights, patch)[key], value) for key, value in weights.items())
    marked = Patch({key: torch.full_like(value, 7) for key, value in patch.values.items()}, cut)
    placed = model.place(weights, marked)
    for key, value in model.cut(placed, cut).values.items():
        assert torch.equal(value, marked.values[key])  # held coordinates
    for key, value in weights.items():
        outside = torch.ones_like(value, dtype=torch.bool)
        view = model.place(
            {key: outside}, Patch({key: torch.zeros_like(patch.values[key], dtype=torch.bool)}, cut)
        )
        assert torch.equal(placed[key][view[key]], value[view[key]])  # everything else


@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_cut_inside_a_cut(name, first, second):
    model = case(name).model
    outer = random_cut(model.groups, np.random.default_rng(first))
    generator = np.random.default_rng(second)
    channels = {}
    for group in model.groups.elastic:
        held = list(outer.channels.get(group, range(model.groups.counts[group])))
        count = int(generator.integers(1, len(held) + 1))
        channels[group] = sorted(generator.choice(held, count, replace=False).tolist())
    inner = Cut.of(model.groups, channels)
    weights = model.weights()
    direct = model.cut(weights, inner)
    nested = model.narrow(model.cut(weights, outer), inner)
    assert all(torch.equal(nested.values[key], value) for key, value in direct.values.items())


def test_prefixes_are_nested():
    model = case("DenseNet").model
    cuts = [prefix(model.groups, Fraction(i, 10)) for i in range(1, 11)]
    assert all(large.holds(small) for small, large in pairwise(cuts))


def test_widths_are_the_exact_ceiling_for_all_sizes():
    """``ceil(p * K)`` in rational arithmetic, also where floats get it wrong (0.6 of 10 is 6, not 7)."""
    for parts in (5, 10, 16):
        for i in range(1, parts + 1):
            for channels in range(1, 4097):
                exact = -(-i * channels // parts)
                assert kept(Fraction(i, parts), channels) == exact
    for i in range(1, 11):
        assert as_width(i / 10) == Fraction(i, 10)
        assert as_width(i * 0.1) == Fraction(i, 10)
    assert as_width(0.2 + 0.4) == Fraction(3, 5)
    assert ceil((0.2 + 0.4) * 10) == 7  # what floats would give


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "two", float("nan"), None, True])
def test_widths_that_make_no_sense(wrong):
    with pytest.raises(FedtailorError, match="expected a number above 0 and at most 1"):
        as_width(wrong)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.data())
def test_kept_positions_are_what_the_definition_says(width, repeat, blocks, offset, data):
    stride = width * repeat + data.draw(st.integers(0, 2))
    length = offset + (blocks - 1) * stride + width * repeat + data.draw(st.integers(0, 3))
    axis = Axis("g", offset, repeat, blocks, stride)
    units = sorted(data.draw(st.sets(st.integers(0, width - 1), min_size=1)))
    positions = {
        unit: [offset + b * stride + unit * repeat + r for b in range(blocks) for r in range(repeat)]
        for unit in range(width)
    }
    gone = {p for unit in range(width) if unit not in units for p in positions[unit]}
    expected = [p for p in range(length) if p not in gone]
    cut = Cut({"g": as_units(units, width, "g")})
    found = kept_positions(Extent(length, (axis,)), cut, {"g": width})
    assert (list(range(found)) if isinstance(found, int) else found.tolist()) == expected
    values = torch.arange(length)
    (index,) = where_of([Extent(length, (axis,))], cut, {"g": width})
    assert values[index].tolist() == expected
