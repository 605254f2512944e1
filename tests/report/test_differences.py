"""Paired differences: numbers from a table of Student's t, and honest words for few seeds."""

from __future__ import annotations

import pytest

from fedtailor.report.differences import paired, what_seeds_can_tell


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
    assert "0.20 false alarms" in what_seeds_can_tell(5, comparisons=4)
