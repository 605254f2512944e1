"""Private rounds: what is clipped, what noise is added, what is divided by, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from private_runs import METHODS, method_of, private_setup, run_private
from scipy import stats

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.messages import ServerState
from fedtailor.privacy.guard import pieces_of
from fedtailor.privacy.noise import normal
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.privacy.sums import clipped, grounds
from fedtailor.seeds import Seeds
from helpers import cnn_model, differing, mlp_model, update_of, vector_data

SIGMA = 5.0  # how many deviations of an estimate are no accident
NOISY = {"clip": 0.5, "noise": 2.0, "seeded": True}


@pytest.mark.parametrize("name", METHODS)
def test_without_noise_and_clipping_the_bits_are_the_plain_ones(name):
    """Everyone takes part, so that those who are expected are those who send: weights, statistics and counts."""
    plain = run_private(private_setup(method_of(name), cnn_model(), PrivacySettings()))
    private = run_private(private_setup(method_of(name), cnn_model(), PrivacySettings(clip=1e30)))
    assert differing(plain.state.weights, private.state.weights) == set()
    assert private.records[-1].train_loss == plain.records[-1].train_loss


def test_a_smaller_cohort_divides_by_who_was_expected():
    """Two of six are expected, one tier; a round with n of them moves n/2 of the mean's way."""
    method, model = method_of("fedavg"), mlp_model()
    setup = private_setup(method, model, PrivacySettings(clip=1e30), vector_data(), "equal", cohort=2)
    state = ServerState(0, {name: torch.zeros_like(value) for name, value in model.weights().items()})
    for senders in (0, 1, 3):
        ones = model.cut(
            {name: torch.ones_like(value) for name, value in state.weights.items()}, Cut.everything()
        )
        (told,) = setup.guard.release(state, [], [update_of(number, ones) for number in range(senders)])
        assert {float(value.min()) for value in told.patch.values.values()} == {senders / 2}
        assert {float(value.max()) for value in told.patch.values.values()} == {senders / 2}


def test_the_whole_difference_is_clipped_and_a_short_one_left_alone():
    method, model = method_of("fedavg"), mlp_model()
    setup = private_setup(method, model, PrivacySettings(clip=0.5), vector_data(), "equal")
    state, guard = ServerState(0, model.weights()), setup.guard
    pieces = pieces_of(method, model, setup.fleet.tiers, state, setup.seeds)
    ground = grounds(state.weights, pieces, guard.terms, model)
    for scale, length in ((10.0, 0.5), (1e-3, None)):
        moved = {name: value + scale * torch.ones_like(value) for name, value in state.weights.items()}
        patch = model.cut(moved, Cut.everything())
        found = clipped(state, patch, ground, guard.terms, model)
        steps = torch.cat([(found[name] - state.weights[name].double()).flatten() for name in found])
        if length is not None:
            assert float(steps.norm()) == pytest.approx(length, rel=1e-12)
            assert torch.allclose(steps, steps[0].expand_as(steps), rtol=1e-5)
        else:
            assert all(torch.equal(found[name], patch.values[name].double()) for name in found)


def test_every_ring_may_have_a_clip_of_its_own():
    method, model = method_of("heterofl"), cnn_model()
    rings = {"1/3": 0.1, "2/3": 0.2, "1": 0.4}
    setup = private_setup(method, model, PrivacySettings(clip=rings))
    state, guard = ServerState(0, model.weights()), setup.guard
    pieces = pieces_of(method, model, setup.fleet.tiers, state, setup.seeds)
    ground = grounds(state.weights, pieces, guard.terms, model)
    floats = {
        name: value + 1 if value.is_floating_point() else value for name, value in state.weights.items()
    }
    found = clipped(state, model.cut(floats, Cut.everything()), ground, guard.terms, model)
    for ring, clip in enumerate(rings.values()):
        squares = sum(
            float((value - state.weights[name].double())[ground[name].ring == ring].square().sum())
            for name, value in found.items()
        )
        assert squares**0.5 == pytest.approx(clip, rel=1e-9)


def test_noise_is_normal_and_of_the_deviation_that_was_said():
    drawn = normal(b"key", "a text", (200_000,)).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    other = normal(b"key", "another text", (200_000,)).numpy()
    assert abs(np.corrcoef(drawn, other)[0, 1]) < SIGMA / len(drawn) ** 0.5
    assert np.array_equal(drawn[:1000], normal(b"key", "a text", (1000,)).numpy())


def test_the_noise_of_every_ring_has_its_deviation():
    """Nobody sends: what is released is noise over the number that was expected."""
    model, noises = mlp_model(96), {"1/3": 3.0, "2/3": 2.0, "1": 1.0}
    setup = private_setup(
        method_of("heterofl"), model, PrivacySettings(clip=0.5, noise=noises), vector_data(), cohort=3
    )
    state = ServerState(0, {name: torch.zeros_like(value) for name, value in model.weights().items()})
    ground = grounds(
        state.weights,
        pieces_of(setup.method, model, setup.fleet.tiers, state, setup.seeds),
        setup.guard.terms,
        model,
    )
    found = {ring: [] for ring in range(3)}
    for round in range(12):
        now = replace(state, round=round)
        told = setup.guard.release(now, [], [])[-1].patch.values  # the last tier holds everything
        for name, value in told.items():
            for ring in found:
                mask = ground[name].ring == ring
                found[ring].append((value.double() * ground[name].expected)[mask])
    for ring, noise in enumerate(noises.values()):
        sample = torch.cat(found[ring])
        assert len(sample) > 1000
        assert float(sample.std()) == pytest.approx(noise * 0.5, rel=SIGMA / (2 * len(sample)) ** 0.5)
        assert abs(float(sample.mean())) < SIGMA * noise * 0.5 / len(sample) ** 0.5


def test_rings_without_a_client_get_noise_all_the_same():
    """Who took part must not show: also what nobody has sent in a round is noisy."""
    setup = private_setup(method_of("heterofl"), cnn_model(), PrivacySettings(**NOISY), cohort=1)
    result = run_private(setup)
    before = setup.start.state.weights
    moved = [name for name in differing(before, result.state.weights) if before[name].is_floating_point()]
    assert len(moved) == sum(value.is_floating_point() for value in before.values())
    assert all(
        bool((result.state.weights[name] != before[name]).all())
        for name in moved
        if "running_var" not in name
    )
    assert all(
        bool((value >= 0).all()) for name, value in result.state.weights.items() if "running_var" in name
    )


def test_noise_leaves_counts_alone_and_metrics_unsaid():
    setup = private_setup(method_of("heterofl"), cnn_model(), PrivacySettings(**NOISY))
    result = run_private(setup)
    assert result.state.weights["1.num_batches_tracked"] == setup.start.state.weights["1.num_batches_tracked"]
    assert [record.train_loss for record in result.records] == [None] * 3
    assert all(not record.reported for record in result.records)
    assert [record.privacy["releases"] for record in result.records] == [1, 2, 3]
    spent = [record.privacy["epsilon"]["1"] for record in result.records]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(setup.terms.epsilons(3)["1"], abs=1e-6)


def test_seeded_noise_repeats_and_other_noise_does_not():
    def weights(**settings):
        method, privacy = method_of("fedavg"), PrivacySettings(**settings)
        return run_private(private_setup(method, mlp_model(), privacy, vector_data(), "equal")).state.weights

    fresh = {**NOISY, "seeded": False}
    assert differing(weights(**NOISY), weights(**NOISY)) == set()
    assert differing(weights(**fresh), weights(**fresh)) != set()


def test_a_poisson_cohort_has_a_binomial_size_and_may_be_empty():
    setup = private_setup(
        method_of("fedavg"), mlp_model(), PrivacySettings(**NOISY), vector_data(), "equal", cohort=2
    )
    sizes = [setup.guard.cohort_size(6, round, 0) for round in range(3000)]
    counts = np.bincount(sizes, minlength=7)
    expected = stats.binom(6, 2 / 6).pmf(range(7)) * len(sizes)
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    rare = private_setup(
        method_of("fedavg"), mlp_model(), PrivacySettings(**NOISY), vector_data(), "equal", cohort=1
    )
    result = run_private(rare)
    assert [record.cohort.asked for record in result.records] == [
        rare.guard.cohort_size(6, n, 0) for n in range(3)
    ]
    fixed = PrivacySettings(**NOISY, sampling="known")
    of_two = private_setup(method_of("fedavg"), mlp_model(), fixed, vector_data(), "equal", cohort=2)
    assert {record.cohort.asked for record in run_private(of_two).records} == {2}


def test_a_client_far_beyond_the_others_is_clipped_and_not_refused():
    """Whether an answer counts must not depend on the answers of others."""
    method, model, data = method_of("fedavg"), mlp_model(), vector_data()
    inputs, labels = data.train.columns
    far = inputs.clone()
    far[:6] *= 1e4
    wild = replace(data, train=type(data.train).of(far, labels))
    plain = run_private(private_setup(method, model, PrivacySettings(), wild, "equal"))
    private = run_private(private_setup(method, model, PrivacySettings(clip=0.1), wild, "equal"))
    assert plain.records[0].cohort.refused.get("absurd-step") == 1
    assert "absurd-step" not in private.records[0].cohort.refused


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (lambda: method_of("flado"), "flado does more in its merge"),
        (lambda: method_of("uniprob"), "uniprob does more in its merge"),
        (lambda: method_of("federated-dropout", mask="client"), "gives each client a piece of its own"),
        (lambda: method_of("fedavg", only_able=True), "chooses who may take part"),
        (lambda: method_of("fedavg", weighting="samples"), r"method\.weighting = 'samples': expected count"),
        (lambda: method_of("fedpa", weighting="count"), "lets clients score their own networks"),
        (lambda: method_of("heterofl", norm="static"), r"method\.norm = 'static' measures batch norm"),
        (
            lambda: replace(method_of("fedavg", weighting="count"), merging=MergeSettings("median")),
            r"merge\.rule = 'median': with \[privacy\] the merge sees sums with noise",
        ),
    ],
)
def test_methods_that_cannot_be_private_are_refused(method, sentence):
    with pytest.raises(FedtailorError, match=sentence):
        private_setup(method(), cnn_model(), PrivacySettings(clip=1.0))


def test_fleets_data_and_engines_that_cannot_be_private_are_refused():
    model, settings = mlp_model(), PrivacySettings(clip=1.0)
    for fleet in (fleet_by_name("flops-0.04-0.64"), replace(fleet_by_name("uniform-3"), dynamic=True)):
        with pytest.raises(FedtailorError, match="redraws tiers"):
            private_setup(method_of("heterofl"), model, settings, vector_data(), fleet)
    chosen = vector_data().with_validation(0.3, Seeds(0), 1)
    with pytest.raises(FedtailorError, match=r"expected data\.validation = 0"):
        private_setup(method_of("heterofl"), model, settings, chosen)


def test_label_rows_that_a_client_does_not_own_count_as_unchanged():
    """HeteroFL's own setting: rows of other labels are missing, and missing is a difference of zero."""
    method, model = method_of("heterofl", label_rows=True), mlp_model()
    setup = private_setup(method, model, PrivacySettings(clip=1e30), vector_data(), "equal")
    weights = model.weights()
    rows = Cut.of(model.groups, {model.groups.outputs[0]: [1]})
    moved = model.cut({name: value + 6 for name, value in weights.items()}, rows)
    (told,) = setup.guard.release(ServerState(0, weights), [], [update_of(0, moved)])
    steps = (told.patch.values["2.bias"] - weights["2.bias"]).tolist()
    assert steps == [0, pytest.approx(1), 0, 0]  # one of six who were expected, of a difference of 6
