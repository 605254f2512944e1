"""Greedy channel search: it ends, it ends within the budget and not earlier, and it judges what it says it judges."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import FedtailorError
from fedtailor.methods.apfl.channel_search import LocalScore, Shrinking, prune
from helpers import bits, cnn_model, images

SHARES = [Fraction(1, 10), Fraction(1, 5), Fraction(3, 10), Fraction(1, 2), Fraction(9, 10)]


@pytest.mark.parametrize("share", SHARES)
def test_a_group_loses_a_share_and_at_least_one_unit(share):
    for count in range(2, 300):
        paper = ceil(count * (1 - share))
        smaller = Shrinking(share).below(count, range(1, 301))
        assert smaller == (paper if paper < count else count - 1)
    assert Shrinking(share).below(1, range(1, 301)) is None


def test_only_sizes_that_a_cut_may_keep_and_never_below_the_minimum():
    assert Shrinking(Fraction(1, 10)).below(32, (8, 16, 24, 32)) == 24  # 29 is no multiple of 8
    assert Shrinking(Fraction(1, 10)).below(8, (8, 16)) is None
    assert Shrinking(Fraction(1, 2), 8).below(10, range(1, 11)) == 8
    assert Shrinking(Fraction(1, 2), 8).below(8, range(1, 11)) is None


def path(start, budget, score, share=Fraction(1, 10), weights=None, minimum=1, per_mac=False):
    weights = weights or (1,) * len(start)

    def macs(size):
        return sum(w * n for w, n in zip(weights, size, strict=True))

    allowed = [range(1, count + 1) for count in start]
    shrinking = Shrinking(share, minimum)
    return prune(start, allowed, lambda s: macs(s) <= budget, score, macs, shrinking, per_mac), macs


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(SHARES),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_it_ends_in_the_first_size_that_fits(start, share, budget, seed):
    scores: dict = {}
    draw = torch.Generator().manual_seed(seed)

    def score(size):
        return scores.setdefault(size, float(torch.rand((), generator=draw)))

    weights = range(1, len(start) + 1)
    least, most = sum(weights), sum(w * n for w, n in zip(weights, start, strict=True))
    allowed = least + budget * (most - least)
    sizes, macs = path(tuple(start), allowed, score, share, tuple(weights))
    assert macs(sizes[-1]) <= allowed
    assert all(macs(size) > allowed for size in sizes[:-1])
    for before, after in pairwise(sizes):
        changed = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
        assert (
            len(changed) == 1
        )  # groups that were only tried have what they had: no rounding on the way back
        assert changed[0][1] == Shrinking(share).below(changed[0][0], range(1, 41)) < changed[0][0]
        drops = [
            score(before) - score((*before[:g], smaller, *before[g + 1 :]))
            for g, count in enumerate(before)
            if (smaller := Shrinking(share).below(count, range(1, 41))) is not None
        ]
        assert score(before) - score(after) == min(drops)


def test_the_paper_would_not_come_back_from_29_channels():
    """floor(ceil(29 * 0.9) / 0.9) = 30: the pseudo code would grow a layer that was only tried."""
    assert int(ceil(Fraction(29) * Fraction(9, 10)) / Fraction(9, 10)) == 30
    sizes, _ = path((29, 20), 47, lambda size: float(size[0] == 29))
    assert sizes == [(29, 20), (29, 18)]


def test_the_paper_would_shrink_9_channels_for_ever():
    """ceil(9 * 0.9) = 9 costs no accuracy at all, and so would be taken again and again."""
    assert ceil(Fraction(9) * Fraction(9, 10)) == 9
    sizes, _ = path((9, 9), 4, lambda size: 0.5)
    assert len(sizes) == 15
    assert sum(sizes[-1]) == 4


def test_a_budget_that_cannot_be_met_is_an_error():
    with pytest.raises(
        FedtailorError, match="no channel group can shrink any more.*4, 4.*method.min_channels"
    ):
        path((9, 9), 7, lambda size: 0.5, minimum=4)


def test_without_need_nothing_shrinks_and_nothing_is_judged():
    def never(size):
        raise AssertionError

    assert path((9, 9), 18, never)[0] == [(9, 9)]


def test_ties_go_to_the_larger_saving_and_then_to_the_first():
    assert path((10, 10), 100, lambda size: 0.5, weights=(1, 10))[0][1] == (10, 9)
    assert path((10, 10), 19, lambda size: 0.5)[0][1] == (9, 10)


def test_drop_per_saved_mac():
    """The first group costs 0.1 and saves 1, the second 0.2 and saves 10."""

    def score(size):
        return 1 - 0.1 * (size[0] < 10) - 0.2 * (size[1] < 10)

    assert path((10, 10), 109, score, weights=(1, 10))[0][1] == (9, 10)
    assert path((10, 10), 109, score, weights=(1, 10), per_mac=True)[0][1] == (10, 9)


def test_the_score_is_the_accuracy_of_the_small_network_on_statistics_of_the_examples():
    model, data = cnn_model(), images(20)
    patch = model.cut(model.weights(), Cut.everything(), set(model.parameters))
    before = {name: bits(value) for name, value in patch.values.items()}
    score = LocalScore(model, patch, data)
    batch = data.take(torch.arange(20))
    for size in ((4, 6), (3, 6), (2, 5)):
        cut = model.costs.cut(size)
        output = model.forward(model.narrow(patch, cut).values, cut, batch, mode="train")
        expected = float((output.argmax(1) == batch[1]).double().mean())
        assert score(size) == expected
        assert score.metrics(size)["loss"] == pytest.approx(
            float(model.objective.loss(output, batch)), rel=1e-5
        )
    assert {name: bits(value) for name, value in patch.values.items()} == before


def test_each_size_is_run_once_and_without_gradients(monkeypatch):
    model, data = cnn_model(), images(20)
    patch = model.cut(model.weights(), Cut.everything(), set(model.parameters))
    seen, forward = [], model.forward

    def watched(*args, **kwargs):
        seen.append(torch.is_grad_enabled())
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    score = LocalScore(model, patch, data)
    assert [score((4, 6)), score((3, 6))] == [score((4, 6)), score((3, 6))]
    assert seen == [False, False]
    assert score.macs == 20 * sum(model.cost(model.costs.cut(size)).macs for size in ((4, 6), (3, 6)))
