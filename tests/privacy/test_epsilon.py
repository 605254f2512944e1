"""What rounds cost, against dp-accounting called by hand and against closed formulas."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import minimize_scalar

from fedtailor.errors import FedtailorError
from fedtailor.privacy.accounting import Mechanism, epsilon, multiplier_for, rounds_within
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.privacy.terms import Terms

RINGS = {"small": 2.0, "middle": 1.5, "large": 1.2}


def by_hand(multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """As a reader of dp-accounting's manual would write it."""
    accountant = RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), rounds)
    return accountant.get_epsilon(delta)


def terms_of(asked: int = 10, rounds: int = 100, **settings: object) -> Terms:
    tiers, counts = list(RINGS), (100, 60, 40)
    return Terms.of(PrivacySettings(**settings), tiers, counts, asked, rounds)


def test_every_tier_pays_for_the_rings_that_its_clients_touch():
    """The design's example: rings of their own clips, z = (2, 1.5, 1.2), q = 0.05, 100 rounds."""
    spent = terms_of(clip=dict.fromkeys(RINGS, 1.0), noise=RINGS).epsilons(100)
    root = [sum(z**-2 for z in list(RINGS.values())[:held]) ** -0.5 for held in (1, 2, 3)]
    assert list(spent.values()) == [pytest.approx(by_hand(z, 0.05, 100, 1e-5), rel=1e-9) for z in root]
    assert [round(each, 2) for each in spent.values()] == [1.22, 2.79, 5.81]


def test_with_the_whole_update_clipped_the_least_noise_counts():
    terms = terms_of(clip=1.0, noise=RINGS)
    assert [terms.multiplier(tier) for tier in range(3)] == [2.0, 1.5, 1.2]
    assert terms.epsilons(100)["large"] == pytest.approx(by_hand(1.2, 0.05, 100, 1e-5), rel=1e-9)


def test_one_noise_costs_all_tiers_the_same():
    (spent,) = set(terms_of(clip=3.0, noise=1.0).epsilons(100).values())
    assert spent == pytest.approx(4.0389130, abs=1e-6)


def test_without_sampling_it_is_the_gaussian_mechanism():
    """Rényi: T a / (2 z^2), and the best order a of the conversion to epsilon (Canonne, Kamath, Steinke 2020)."""

    def at(order: float) -> float:
        divergence = 100 * order / 2
        return divergence + math.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)

    exact = minimize_scalar(at, bounds=(1.01, 50), method="bounded").fun
    known = epsilon({Mechanism("known", 200, 10, 1.0): 100}, 1e-5)
    assert exact <= known <= 1.01 * exact
    assert known == epsilon({Mechanism("poisson", 10, 10, 1.0): 100}, 1e-5)


@pytest.mark.slow
def test_a_fixed_cohort_is_paid_for_as_a_replacement_of_twice_the_clip():
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(200, 10, dp_accounting.GaussianDpEvent(0.5))
    accountant.compose(sampled, 100)
    assert epsilon({Mechanism("fixed", 200, 10, 1.0): 100}, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5)
    )


def test_rounds_of_different_noise_add_up():
    first, second = Mechanism("poisson", 200, 10, 1.0), Mechanism("poisson", 200, 10, 2.0)
    both = epsilon({first: 50, second: 50}, 1e-5)
    assert epsilon({second: 100}, 1e-5) < both < epsilon({first: 100}, 1e-5)
    assert epsilon({}, 1e-5) == 0
    assert epsilon({Mechanism("poisson", 200, 10, 0.0): 1}, 1e-5) == math.inf


@pytest.mark.slow
def test_the_noise_of_a_target_is_the_least_that_meets_it():
    mechanism = Mechanism("poisson", 200, 10, 0.0)
    needed = multiplier_for(2.0, mechanism, 100, 1e-5)
    assert by_hand(needed, 0.05, 100, 1e-5) <= 2.0 < by_hand(needed - 2e-4, 0.05, 100, 1e-5)


@pytest.mark.slow
def test_the_rounds_of_a_target_are_the_most_that_meet_it():
    mechanism = Mechanism("poisson", 200, 10, 1.0)
    rounds = rounds_within(2.0, mechanism, 1e-5)
    assert by_hand(1.0, 0.05, rounds, 1e-5) <= 2.0 < by_hand(1.0, 0.05, rounds + 1, 1e-5)


def test_noise_that_is_left_open_is_what_epsilon_needs():
    whole = terms_of(clip=1.0, epsilon=2.0, sampling="known")
    rings = terms_of(clip=dict.fromkeys(RINGS, 1.0), epsilon=2.0, sampling="known")
    for terms in (whole, rings):
        worst = max(terms.epsilons(100).values())
        assert 1.99 < worst <= 2.0
    assert rings.noises[0] == pytest.approx(math.sqrt(3) * whole.noises[0], abs=2e-4)


def test_a_plan_that_costs_too_much_is_refused_with_what_would_do():
    terms = terms_of(clip=1.0, noise=10.0, sampling="known")
    terms.refuse_beyond(5.0, 100)
    needed, fewer = terms.noise_for(2.0, 100), terms.rounds_for(2.0)
    with pytest.raises(
        FedtailorError, match=rf"cost tier 'small' 4\.73; expected privacy\.noise = {needed:g} or "
    ):
        terms.refuse_beyond(2.0, 100)
    terms.refuse_beyond(2.0, fewer)
    terms.with_noise(needed).refuse_beyond(2.0, 100)
    with pytest.raises(
        FedtailorError, match=r"privacy\.epsilon = 1e-06: 100 rounds .* would need noise of \d+ times"
    ):
        terms_of(clip=1.0, epsilon=1e-6, sampling="known")


@pytest.mark.parametrize("sampling", ["known", pytest.param("fixed", marks=pytest.mark.slow)])
def test_every_sampling_has_its_noise(sampling):
    mechanism = Mechanism(sampling, 200, 10, 0.0)
    needed = multiplier_for(50.0, mechanism, 10, 1e-5)
    assert epsilon({replace(mechanism, multiplier=needed): 10}, 1e-5) <= 50.0
    assert multiplier_for(1e9, mechanism, 1, 1e-5) == 0.01


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(FedtailorError, match=r"pip install 'fedtailor\[privacy\]'"):
        epsilon({Mechanism("poisson", 123, 10, 1.0): 7}, 1e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"noise": 1.0}, r"privacy\.noise = 1\.0: expected privacy\.clip with it"),
        ({"epsilon": 1.0}, r"privacy\.epsilon = 1\.0: expected privacy\.clip with it"),
        ({"clip": -1.0}, r"privacy\.clip = -1\.0: expected at least 0"),
        ({"clip": {"small": 0.0}}, r"privacy\.clip = .*numbers above 0"),
        ({"clip": 1.0, "delta": 0.0}, r"privacy\.delta = 0\.0"),
        ({"clip": 1.0, "sampling": "posson"}, r"unknown privacy\.sampling 'posson': did you mean 'poisson'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(FedtailorError, match=sentence):
        PrivacySettings(**settings)


def test_tables_name_the_tiers_of_the_fleet():
    with pytest.raises(FedtailorError, match=r"unknown tier in privacy\.noise 'huge'"):
        terms_of(clip=1.0, noise={**RINGS, "huge": 1.0})
    with pytest.raises(FedtailorError, match=r"a number for every tier, also for middle, large"):
        terms_of(clip=1.0, noise={"small": 1.0})
    with pytest.raises(
        FedtailorError, match=r"privacy\.delta = 0\.01: expected below 1 in the number of clients"
    ):
        terms_of(clip=1.0, noise=1.0, delta=0.01)


def test_an_infinite_clip_is_none():
    assert not PrivacySettings(clip=math.inf).active
