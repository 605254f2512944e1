"""Greedy channel search: it ends, it ends within the budget and not earlier, and it judges what it says it judges."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import FedtailorError
from fedtailor.methods.apfl import judging
from fedtailor.methods.apfl.channel_search import Search, Shrinking
from fedtailor.methods.apfl.judging import Judge
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
    assert Shrinking(Fraction(1, 2)).below(10, range(8, 11)) == 8
    assert Shrinking(Fraction(1, 2)).below(8, range(8, 11)) is None


def path(start, budget, score, share=Fraction(1, 10), weights=None, minimum=1, per_mac=False):
    weights = weights or (1,) * len(start)

    def macs(size):
        return sum(w * n for w, n in zip(weights, size, strict=True))

    def choose(now, candidates):
        def loss(size):
            saved = macs(now) - macs(size)
            drop = score(now) - score(size)
            return (drop / max(1, saved) if per_mac else drop), -saved

        return min(candidates, key=loss)

    allowed = [range(minimum, count + 1) for count in start]
    search = Search(allowed, lambda s: macs(s) <= budget, macs, Shrinking(share))
    return search.down(start, choose), macs


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
    with pytest.raises(FedtailorError, match="no channel group can shrink any more.*4, 4.*method.smallest"):
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


def larger(now, candidates):
    """The one that adds most, without any judge."""
    return max(candidates, key=sum)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(8, 60), min_size=2, max_size=4), st.sampled_from(SHARES), st.integers(0, 1000))
def test_what_is_left_of_a_budget_is_spent_within_both_limits(full, share, seed):
    """Macs and parameters weigh groups in opposite ways: where parameters bind, units are exchanged."""
    draw = torch.Generator().manual_seed(seed)
    by_mac = [int(w) for w in torch.randint(1, 9, (len(full),), generator=draw)]
    by_param = [10 - w for w in by_mac]

    def weighed(weights):
        return lambda size: sum(w * n for w, n in zip(weights, size, strict=True))

    macs, params = weighed(by_mac), weighed(by_param)
    half = tuple(count // 2 for count in full)

    def fits(size):
        return macs(size) <= macs(half) and params(size) <= params(half)

    search = Search([range(1, count + 1) for count in full], fits, macs, Shrinking(share))
    low = search.down(tuple(full), lambda _, candidates: candidates[-1])[-1]
    sizes = search.up(low, 0.98 * macs(half), larger)
    assert all(fits(size) for size in sizes)
    assert all(macs(before) < macs(after) for before, after in pairwise(sizes))
    if macs(sizes[-1]) < 0.98 * macs(half):  # then no single step goes any further
        for group, count in enumerate(sizes[-1]):
            assert count == full[group] or not fits((*sizes[-1][:group], count + 1, *sizes[-1][group + 1 :]))


def test_a_group_grows_at_the_cost_of_one_that_pays_with_parameters():
    """Parameters bind: the second group has most of them and few multiply-accumulates."""

    def macs(size):
        return 10 * size[0] + size[1]

    def fits(size):
        return macs(size) <= 120 and size[0] + 10 * size[1] <= 110

    search = Search([range(1, 21), range(1, 21)], fits, macs, Shrinking(Fraction(1, 10)))
    sizes = search.up((5, 10), 117.6, larger)
    assert sizes[0] == (5, 10)
    assert macs(sizes[-1]) >= 117.6
    assert fits(sizes[-1])


def super_network(model):
    return model.cut(model.weights(), Cut.everything(), set(model.parameters))


def run_alone(model, patch, size, batch):
    cut = model.costs.cut(size)
    return model.forward(model.narrow(patch, cut).values, cut, batch, mode="train")


def test_metrics_are_those_of_the_small_network_on_statistics_of_the_examples():
    model, data = cnn_model(), images(20)
    patch = super_network(model)
    before = {name: bits(value) for name, value in patch.values.items()}
    judge, batch = Judge(model, patch, data), data.take(torch.arange(20))
    for size in ((4, 6), (3, 6), (2, 5)):
        output = run_alone(model, patch, size, batch)
        assert judge.metrics(size)["accuracy"] == float((output.argmax(1) == batch[1]).double().mean())
        loss = float(model.objective.loss(output, batch))
        assert judge.metrics(size)["loss"] == pytest.approx(loss, rel=1e-5)
    assert {name: bits(value) for name, value in patch.values.items()} == before


@pytest.mark.parametrize("by", ["loss", "accuracy"])
def test_the_best_candidate_is_the_one_that_whole_runs_prefer(by, monkeypatch):
    monkeypatch.setattr(judging, "TIED", 0.0)
    model, data = cnn_model(first=12, second=20), images(60)
    patch, batch = super_network(model), data.take(torch.arange(60))
    candidates = [(9, 20), (12, 15), (6, 20), (12, 10)]

    def badness(size):
        output = run_alone(model, patch, size, batch)
        correct = float((output.argmax(1) == batch[1]).double().mean())
        return -correct if by == "accuracy" else float(model.objective.loss(output, batch))

    judge = Judge(model, patch, data, by)
    assert badness(judge.best((12, 20), candidates, prefer=lambda _: 0)) == pytest.approx(
        min(map(badness, candidates))
    )


def test_what_examples_cannot_tell_apart_is_a_tie_and_the_preferred_one_wins():
    model = cnn_model(first=12, second=20)
    weights = {name: torch.zeros_like(value) for name, value in model.weights().items()}
    patch = model.cut(weights, Cut.everything(), set(model.parameters))  # every size answers the same
    judge = Judge(model, patch, images(40))
    candidates = [(9, 20), (12, 15), (6, 20)]
    assert judge.best((12, 20), candidates, prefer=lambda size: -sum(size)) == (6, 20)
    assert judge.best((12, 20), candidates, prefer=sum) == (9, 20)


def test_a_candidate_that_is_clearly_worse_is_not_run_to_the_end(monkeypatch):
    monkeypatch.setattr(judging, "BATCH", 16)
    model, data = cnn_model(first=12, second=20), images(64)
    patch, seen = super_network(model), []
    for name, value in patch.values.items():
        if name.endswith("6.weight") or value.dim() == 2:
            value.mul_(50)  # so that the classifier's answers differ strongly
    judge = Judge(model, patch, data)
    forward = model.forward

    def watched(weights, cut, *args, **kwargs):
        seen.append(model.costs.counts(cut))
        assert not torch.is_grad_enabled()
        return forward(weights, cut, *args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    judge.best((12, 20), [(11, 20), (1, 20), (12, 1), (12, 19)], prefer=lambda _: 0)
    runs = Counter(seen)
    assert runs[(12, 20)] <= 4 + 1  # once for each batch, and once to see what is overwritten
    assert min(runs.values()) < 4
