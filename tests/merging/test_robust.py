"""Robust rules against slow references; thin classes; who is heard; what is refused."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from own_merges import Forgetful, OwnMerge
from torch import Tensor

import fedtailor
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.merging import by_samples, holder_mean
from fedtailor.merging.optimising import VERDICT
from fedtailor.merging.robust import answers as answers_module
from fedtailor.merging.robust.answers import MOST_PIECES, Answers
from fedtailor.merging.robust.krum import krum
from fedtailor.merging.robust.merging import each_merged, heard
from fedtailor.merging.robust.settings import RULES, MergeSettings
from fedtailor.messages import ServerState, Update
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.methods.low_rank.hetlora import HetLoRA
from helpers import NORM1, bits, cnn_model, differing, held_mask, image_data, mlp_model, run, update_of

NAME, OUT = "0.weight", "2.weight"
ROBUST = RULES[1:]
Weights = dict[str, Tensor]


def at_width(model: ElasticModel, width: float) -> Cut:
    return prefix(model.groups, as_width(width)) if width < 1 else Cut.everything()


def stepped(
    model: ElasticModel, number: int, width: float, step: Callable[[Tensor], Tensor], weight: float = 1.0
) -> Update:
    """A client whose trained tensors went by what ``step`` makes of them."""
    patch = model.cut(model.weights(), at_width(model, width))
    values = {name: value + step(value) for name, value in patch.values.items()}
    return update_of(number, Patch(values, patch.cut), weight)


def drawn(
    model: ElasticModel, widths: Sequence[float], seed: int = 0, weights: Sequence[float] | None = None
) -> list[Update]:
    """Honest clients: a common way, and some noise of their own."""
    generator = torch.Generator().manual_seed(seed)

    def step(value: Tensor) -> Tensor:
        return 0.1 + 0.03 * torch.randn(value.shape, generator=generator)

    shares = weights or [1.0] * len(widths)
    return [
        stepped(model, i, width, step, share)
        for i, (width, share) in enumerate(zip(widths, shares, strict=True))
    ]


def merged(model: ElasticModel, updates: Sequence[Update], **settings: Any) -> tuple[Weights, dict[str, Any]]:
    """The weights that a rule makes of updates, and what it says of the clients."""
    hearing = heard(MergeSettings(**settings), model.weights(), updates, model, by_samples)
    return {name: value for name, value, _ in each_merged(hearing)}, hearing.verdict


def columns_of(model: ElasticModel, updates: Sequence[Update], name: str) -> list[list[tuple[float, float]]]:
    """For every coordinate the (value, weight) of those who hold it, placed without the library's blocks."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(model.weights()[name].numel())]
    for update in updates:
        whole = model.place(model.weights(), update.patch)[name].reshape(-1)
        for place in held_mask(model, update.patch.cut, name).reshape(-1).nonzero().reshape(-1).tolist():
            found[place].append((float(whole[place]), update.weight))
    return found


def trimmed(values: list[tuple[float, float]], share: float) -> float:
    out = max(1, int(len(values) * share))
    left = sorted(values)[out : len(values) - out]
    return sum(value * weight for value, weight in left) / sum(weight for _, weight in left)


# Nested tiers of which every ring has at least three holders: the wide one's own ring too.
NESTED = (0.25, 0.25, 0.5, 0.5, 1, 1, 1)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_coordinate_rules_are_those_of_a_slow_reference_over_holders_alone(rule):
    model = mlp_model()
    updates = drawn(model, NESTED, weights=(1, 2, 3, 1, 2, 3, 2))
    found, verdict = merged(model, updates, rule=rule)
    assert verdict == {}
    for name in model.weights():
        for ours, column in zip(
            found[name].reshape(-1).tolist(), columns_of(model, updates, name), strict=True
        ):
            values = [value for value, _ in column]
            theirs = statistics.median(values) if rule == "median" else trimmed(column, 0.2)
            assert ours == pytest.approx(theirs, abs=1e-6)


def test_clip_shortens_to_medians_of_the_class_and_nothing_else():
    model = mlp_model()
    updates = [*drawn(model, NESTED), stepped(model, 7, 1, lambda value: torch.full_like(value, -9.0))]
    found, verdict = merged(model, updates, rule="clip", bound=2.0)
    assert verdict == {"clipped": [7]}
    ring = held_mask(model, at_width(model, 1), OUT) & ~held_mask(model, at_width(model, 0.5), OUT)
    inner = held_mask(model, at_width(model, 0.25), OUT)
    for mask, holders in ((ring, (4, 5, 6, 7)), (inner, range(8))):
        parts = {
            i: [
                (model.place(model.weights(), updates[i].patch)[n] - model.weights()[n])[
                    _same_class(model, n, mask is ring)
                ]
                for n in model.weights()
            ]
            for i in holders
        }
        lengths = {
            i: torch.cat([each.reshape(-1) for each in p]).square().mean().sqrt() for i, p in parts.items()
        }
        limit = 2.0 * statistics.median_low([float(each) for each in lengths.values()])
        shortened = model.weights()[OUT] - 9.0 * limit / float(lengths[7])
        honest = [model.place(model.weights(), updates[i].patch)[OUT] for i in holders if i != 7]
        expected = torch.stack([*honest, shortened]).double().mean(0)
        assert torch.allclose(found[OUT].double()[mask], expected[mask], atol=1e-5)


def _same_class(model: ElasticModel, name: str, outer: bool) -> Tensor:
    quarter, half = (held_mask(model, at_width(model, width), name) for width in (0.25, 0.5))
    return ~half if outer else quarter


def test_clip_where_nobody_goes_too_far_is_the_mean_to_the_bit():
    model = cnn_model()
    updates = drawn_cnn(model)
    found, verdict = merged(model, updates, rule="clip", bound=50.0)
    mean = holder_mean(model.weights(), updates, model)
    trained = [name for name in found if name in model.trainable]
    assert verdict == {}
    assert trained
    assert all(bits(found[name]) == bits(mean[name]) for name in trained)


def drawn_cnn(model: ElasticModel) -> list[Update]:
    """Seven honest clients with running statistics and counts."""
    generator = torch.Generator().manual_seed(3)

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value + 4
        return value + 0.1 + 0.02 * torch.rand(value.shape, generator=generator)

    patches = [model.cut(model.weights(), at_width(model, width)) for width in NESTED]
    return [
        update_of(i, Patch({name: moved(v) for name, v in patch.values.items()}, patch.cut), 1.0 + i % 2)
        for i, patch in enumerate(patches)
    ]


@pytest.mark.parametrize("rule", ROBUST)
def test_the_order_of_arrival_and_the_size_of_blocks_change_no_bit(rule, monkeypatch):
    model = cnn_model()
    updates = drawn_cnn(model)
    once, _ = merged(model, updates, rule=rule)
    turned, _ = merged(model, updates[::-1], rule=rule)
    monkeypatch.setattr(answers_module, "BLOCK", 7)  # a row at a time
    small, _ = merged(model, updates, rule=rule)
    assert differing(once, turned) == set()
    trained = [name for name in once if rule in ("median", "trimmed-mean") or name not in model.trainable]
    assert all(bits(once[name]) == bits(small[name]) for name in trained)
    assert all(torch.allclose(once[name].double(), small[name].double(), atol=1e-6) for name in once)


@pytest.mark.parametrize("rule", ROBUST)
def test_what_nobody_sent_keeps_its_bits(rule):
    model = mlp_model()
    state = ServerState(0, model.weights())
    after = HeteroFL(merging=MergeSettings(rule=rule)).merge(state, drawn(model, (0.5,) * 5), model)
    outside = ~held_mask(model, at_width(model, 0.5), NAME)
    assert bits(after.weights[NAME][outside]) == bits(state.weights[NAME][outside])
    assert differing(after.weights, state.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
def test_one_bad_client_of_a_class_with_three_or_more_cannot_leave_the_range_of_the_honest(rule):
    """Of six clients of one tier, one goes 90 times the other way: the merge stays among what the others sent."""
    model = mlp_model()
    honest = drawn(model, (1,) * 5)
    bad = stepped(model, 5, 1, lambda value: torch.full_like(value, -9.0))
    found, _ = merged(model, [*honest, bad], rule=rule)
    sent = torch.stack([update.patch.values[NAME] for update in honest])
    assert bool(((found[NAME] >= sent.amin(0)) & (found[NAME] <= sent.amax(0))).all())


# Thin classes: one or two holders


def test_in_a_thin_class_a_client_that_goes_against_the_others_elsewhere_is_not_heard():
    model = mlp_model()
    ring = ~held_mask(model, at_width(model, 0.5), NAME)
    liar = stepped(model, 5, 1, lambda value: torch.full_like(value, -0.5))
    for rule in ROBUST:
        alone, verdict = merged(model, [*drawn(model, (0.5,) * 5), liar], rule=rule)
        assert 5 in verdict["unheard"]
        assert bits(alone[NAME][ring]) == bits(model.weights()[NAME][ring])
        honest = drawn(model, (*(0.5,) * 5, 1), seed=1)
        both, _ = merged(model, [*honest[:5], replace(liar, client=6), honest[5]], rule=rule)
        expected = model.place(model.weights(), honest[5].patch)[NAME]
        assert torch.allclose(both[NAME][ring], expected[ring], atol=1e-6)


def test_a_lone_holder_goes_no_further_than_is_usual_elsewhere():
    """Its ring has no median of its own: the bound is that of the class that others hold too."""
    model = mlp_model()
    boasting = stepped(model, 5, 1, lambda value: torch.full_like(value, 30.0))
    found, verdict = merged(model, [*drawn(model, (0.5,) * 5), boasting], rule="median", bound=2.0)
    ring = ~held_mask(model, at_width(model, 0.5), NAME)
    went = (found[NAME] - model.weights()[NAME])[ring]
    assert verdict == {"clipped": [5]}
    assert float(went.max()) == pytest.approx(float(went.min()), rel=1e-4)
    assert 0.19 < float(went.mean()) < 0.23  # two medians of about 0.104


def test_who_is_alone_in_a_round_is_merged_as_it_is():
    model = mlp_model()
    only = stepped(model, 3, 1, lambda value: torch.full_like(value, 30.0))
    for rule in ROBUST:
        found, verdict = merged(model, [only], rule=rule)
        assert verdict == {}
        assert differing(found, only.patch.values) == set()


def test_where_cuts_are_drawn_for_each_client_classes_are_numbers_of_holders():
    model = mlp_model()
    group = next(iter(model.groups.elastic))
    cuts = [
        Cut.of(
            model.groups, {group: [each, each + 1, (each + 4) % 8] if each < 4 else [0, each, 7][: 8 - each]}
        )
        for each in range(7)
    ]
    updates = [
        update_of(i, Patch({n: v + 0.1 for n, v in model.cut(model.weights(), cut).values.items()}, cut))
        for i, cut in enumerate(cuts)
    ]
    answers = Answers.of(model.weights(), updates, model, by_samples)
    assert max(answers.pieces) >= MOST_PIECES
    (block,) = answers.blocks(NAME)
    counts = torch.stack([held_mask(model, cut, NAME).reshape(-1) for cut in cuts]).sum(0)
    assert block.classes.tolist() == counts.tolist()
    for rule in ROBUST:
        found, _ = merged(model, updates, rule=rule)
        held = held_mask(model, Cut.everything(), NAME) & (counts.reshape(found[NAME].shape) > 0)
        assert torch.allclose(found[NAME][held], model.weights()[NAME][held] + 0.1, atol=1e-6)


# Krum


def test_krum_takes_those_that_lie_closest_to_each_other():
    """Five on a line, one far away; with n = 6 and f = 1 the score is the sum over the 3 nearest others."""
    places = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 50.0])
    distances = (places[:, None] - places[None, :]).square()
    assert krum(distances, 1) == {0, 1, 2, 3, 4}
    assert krum(distances, 2) == {1, 2, 3, 0}  # scores of the ends are equal: the first is taken


def test_krum_judges_tiers_apart_and_merges_the_mean_of_the_rest():
    model = mlp_model()
    wide = drawn(model, (1,) * 5)
    narrow = [replace(each, client=10 + each.client) for each in drawn(model, (0.5,) * 5, seed=1)]
    wide[2] = stepped(model, 2, 1, lambda value: torch.full_like(value, 0.4))
    narrow[4] = stepped(model, 14, 0.5, lambda value: torch.full_like(value, -0.4))
    found, verdict = merged(model, [*wide, *narrow], rule="krum")
    assert verdict == {"unheard": [2, 14]}
    rest = [each for each in (*wide, *narrow) if each.client not in (2, 14)]
    assert differing(found, holder_mean(model.weights(), rest, model)) == set()


# What is no step, and what a client says of itself


def test_statistics_are_merged_by_value_and_counts_stay_whole():
    model = cnn_model()
    updates = drawn_cnn(model)
    mean, count = f"{NORM1}.running_mean", f"{NORM1}.num_batches_tracked"
    updates[6].patch.values[mean].fill_(80.0)
    updates[6].patch.values[count].fill_(10**9)
    for rule in ("clip", "median", "trimmed-mean"):
        found, _ = merged(model, updates, rule=rule)
        assert float(found[mean].max()) < 1
        assert int(found[count]) == 4
        assert found[count].dtype == torch.int64


def test_nobody_counts_for_more_than_three_times_the_median():
    model = mlp_model()
    shares = Answers.of(
        model.weights(), drawn(model, (1,) * 5, weights=(1, 2, 2, 3, 10**9)), model, by_samples
    )
    assert shares.weights == [1, 2, 2, 3, 6]


# In a run


def test_the_record_says_whom_a_rule_restrained_and_the_mean_says_nothing():
    model = mlp_model()
    state = ServerState(0, model.weights())
    bad = stepped(model, 5, 1, lambda value: torch.full_like(value, -9.0))
    clipped = HeteroFL(merging=MergeSettings(rule="clip")).merge(state, [*drawn(model, (1,) * 5), bad], model)
    plain = HeteroFL().merge(state, [*drawn(model, (1,) * 5), bad], model)
    assert clipped.moments[VERDICT] == {"clipped": [5]}
    assert plain.moments == {}


def test_a_run_with_a_rule_resumes_to_the_same_bits(tmp_path):
    class CutError(Exception):
        pass

    def stop(record: Any) -> None:
        if record.round == 1:
            raise CutError

    settings: dict[str, Any] = {
        "rounds": 3, "merge": {"rule": "trimmed-mean"}, "server": {"momentum": 0.9}, "engine": {"workers": 0},
        "training": {"batch_size": 4},
    }  # fmt: skip
    arguments = (cnn_model().module, image_data((6,) * 8), "uniform-5", "fedrolex")
    whole = fedtailor.train(*arguments, folder=tmp_path / "whole", **settings)
    with pytest.raises(CutError):
        fedtailor.train(*arguments, folder=tmp_path / "cut", on_round=stop, **settings)
    again = fedtailor.train(*arguments, folder=tmp_path / "cut", resume=True, **settings)
    assert differing(whole.state.weights, again.state.weights) == set()
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]


def test_methods_that_cannot_are_refused():
    median = MergeSettings(rule="median")
    with pytest.raises(
        FedtailorError, match=r"merge.rule = 'median': OwnMerge merges in its own way.*expected"
    ):
        OwnMerge(merging=median)
    with pytest.raises(FedtailorError, match=r"merge.rule = 'median': zeros .* expected method.zero_padding"):
        HetLoRA(merging=median)
    HetLoRA(merging=median, zero_padding=False)
    with pytest.raises(
        FedtailorError, match=r"merge.rule = 'krum': federated-dropout gives each client a piece"
    ):
        fedtailor.train(
            cnn_model().module,
            image_data((6, 5, 4)),
            "uniform-3",
            "federated-dropout",
            merge={"rule": "krum"},
        )
    # One tier whose clients hold the same is enough: of SplitMix the widest, which holds every base.
    fedtailor.train(
        cnn_model().module, image_data((6,) * 6), "uniform-3", "splitmix", merge={"rule": "krum"},
        rounds=1, clients_per_round=6, progress=False,
    )  # fmt: skip
    with pytest.raises(FedtailorError, match="Forgetful.merge did not call the shared merge"):
        run(Forgetful(LocalTraining(batch_size=4), merging=median), cnn_model(), image_data((6, 5)), rounds=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "medain"}, "unknown merge.rule 'medain': did you mean 'median'?"),
        ({"rule": "clip", "bound": 0.0}, "merge.bound = 0.0: expected a number above 0"),
        ({"rule": "trimmed-mean", "trim": 0.5}, "merge.trim = 0.5: expected a share above 0 and below 0.5"),
        ({"rule": "krum", "attackers": 0.0}, "merge.attackers = 0.0: expected a share"),
        ({"rule": "median", "trim": 0.1}, "merge.trim = 0.1: expected 0.2 with merge.rule = 'median'"),
        ({"bound": 3.0}, "merge.bound = 3.0: expected 1.5 with merge.rule = 'mean'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(FedtailorError) as caught:
        MergeSettings(**settings)
    assert str(caught.value).startswith(message)
