"""Paired differences: numbers from a table of Student's t, and honest words for few seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedtailor.report.comparison import with_interval
from fedtailor.report.differences import Difference, judged, paired, seeds_needed, what_seeds_can_tell


def test_the_interval_is_students():
    found = paired([1.0, 2.0, 3.0], [2.0, 3.5, 3.5])  # differences 1, 1.5, 0.5: mean 1, deviation 0.5
    assert found.mean == pytest.approx(1.0)
    assert found.deviation == pytest.approx(0.5)
    assert found.half_width == pytest.approx(4.302653 * 0.5 / 3**0.5, rel=1e-6)
    assert found.beyond_noise is False
    assert paired([1.0, 2.0, 3.0], [3.0, 4.1, 5.2]).beyond_noise is True


def test_pairing_removes_what_seeds_share():
    """Seeds that differ by far more than the methods do not hide a steady difference."""
    hard, easy = [0.2, 0.5, 0.9, 0.4], [0.21, 0.511, 0.909, 0.412]
    assert paired(hard, easy).verdict == "larger than noise"


def test_what_cannot_be_told_is_not_told():
    assert paired([0.5], [0.9]).verdict == "one seed: cannot be told"
    equal_steps = paired([0.5, 0.5], [0.75, 0.75])
    assert equal_steps.verdict == "cannot be told"  # accuracies come in steps
    assert paired([0.5, 0.5], [0.5, 0.5]).verdict == "cannot be told with 2 seeds"
    assert paired([0.5, 0.6, 0.5, 0.6, 0.5], [0.6, 0.5, 0.6, 0.5, 0.5]).verdict == "within noise"
    assert paired([0.5, float("nan")], [0.5, 0.5]).beyond_noise is None


def test_few_seeds_are_called_few():
    assert "cannot" in what_seeds_can_tell(1) or "none of these" in what_seeds_can_tell(1)
    assert "9.0 times" in what_seeds_can_tell(2)
    assert "is not equal" in what_seeds_can_tell(3)
    assert "is not equal" not in what_seeds_can_tell(5)


def test_holm_multiplies_the_smallest_chance_by_the_number_of_comparisons():
    given = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    family = {name: Difference(5, 0.1, 0.1, 0.1, chance) for name, chance in given.items()}
    chances = {name: each.chance for name, each in judged(family).items()}
    assert chances == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )  # never below the one before it
    assert [each.beyond_noise for each in judged(family).values()] == [True, False, False, True]
    alone = judged({"a": family["b"]})
    assert alone["a"].chance == 0.04


def test_a_difference_that_stands_alone_may_not_stand_among_many():
    near = paired([0.5, 0.5, 0.5, 0.5, 0.5], [0.51, 0.52, 0.5, 0.515, 0.505])
    assert near.beyond_noise is True
    chance = paired([0.5, 0.5, 0.5, 0.5, 0.5], [0.51, 0.49, 0.5, 0.505, 0.495])
    many = judged({"near": near, **{f"other {n}": chance for n in range(5)}})
    assert many["near"].beyond_noise is False
    assert many["near"].half_width == near.half_width  # intervals are not corrected
    single = judged({"one": paired([0.5], [0.6]), "near": near})
    assert single["one"].beyond_noise is None
    assert single["near"].chance == near.chance  # what has no chance is no comparison


def test_how_many_seeds_a_point_takes():
    """By simulation: so many seeds find a difference of one point in about four of five experiments."""
    generator = np.random.default_rng(0)
    for deviation in (0.005, 0.01, 0.018):
        needed = seeds_needed(deviation)
        draws = generator.normal(0.01, deviation, size=(4000, needed))
        told = (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05) & (draws.mean(axis=1) > 0)
        found = np.mean(told)
        assert found >= 0.78
    assert seeds_needed(0.02) is None  # 34
    words = what_seeds_can_tell(3, [paired([0.5, 0.6, 0.7], [0.52, 0.6, 0.71])] * 2)
    assert "corrected for 2 comparisons (Holm)" in words
    assert "telling a difference of one point 4 times out of 5 takes 10 seeds." in words
    assert "the differences from heterofl seen here (median of 2)" in what_seeds_can_tell(
        3, [paired([0.5, 0.6, 0.7], [0.52, 0.6, 0.71])] * 2, against="heterofl"
    )


def test_two_seeds_that_tell_nothing_have_no_interval_and_no_absurd_number():
    wild = paired([0.80, 0.84], [0.73, 0.57])
    assert wild.half_width > 0.75
    assert with_interval("accuracy", wild) == "-17.00 points"
    words = what_seeds_can_tell(2, [wild], against="heterofl")
    assert "Two seeds tell nothing where no interval is shown." in words
    assert words.endswith("takes more seeds than anyone runs (over 30).")
    clear = paired([0.80, 0.81], [0.50, 0.511])
    assert clear.beyond_noise
    assert with_interval("accuracy", clear) == "-29.95 ± 0.64 points"
    assert "tell nothing" not in what_seeds_can_tell(2, [clear])
    three = paired([0.1, 0.9, 0.5], [0.9, 0.1, 0.6])
    assert with_interval("accuracy", three) == "+3.33 ± over 100 points"
    assert with_interval("loss", three).startswith("+0.0333 ± 1.99")
