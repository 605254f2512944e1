"""What a target cost, computed by hand."""

from __future__ import annotations

import pytest

from fedtailor.report.targets import common_target, cost_to_reach, metric_of, spent


def row(round, accuracy=None, sent=10, macs=100, metric="accuracy"):
    tiers = (
        {}
        if accuracy is None
        else {"tiers": {"a": {"loss": 1.0, metric: accuracy}, "b": {"loss": 1.0, metric: 0.5}}}
    )
    return {"round": round, "bytes_down": sent, "bytes_up": 1, "macs": macs, **tiers}


ROWS = [row(1), row(2, 0.3), row(3), row(4, 0.9), row(5, 0.7)]  # mean over tiers: 0.4, 0.7, 0.6


def test_spending_adds_up_over_rounds():
    assert spent(ROWS)[2] == {"rounds": 3, "bytes": 33, "macs": 300}


@pytest.mark.parametrize(("target", "rounds"), [(0.4, 2), (0.41, 4), (0.7, 4), (0.71, None)])
def test_the_first_evaluation_that_is_good_enough_counts(target, rounds):
    found = cost_to_reach(ROWS, target)
    assert (found and found["rounds"]) == rounds
    if rounds:
        assert found == {"rounds": rounds, "bytes": 11 * rounds, "macs": 100 * rounds}


def test_less_is_better_for_losses_and_errors():
    rows = [row(1, 0.9, metric="perplexity"), row(2, 0.2, metric="perplexity")]
    assert metric_of(rows) == "perplexity"
    assert cost_to_reach(rows, 0.4)["rounds"] == 2
    assert cost_to_reach(rows, 0.3) is None


def test_the_common_target_is_one_that_most_runs_reached():
    other = [row(1, 0.858)]  # mean 0.679
    assert common_target([ROWS, other], "accuracy") == 0.67
    assert all(cost_to_reach(rows, 0.67) for rows in (ROWS, other))
    assert common_target([ROWS, [row(1)]], "accuracy") is None
    assert common_target([[row(1, float("nan"))]], "accuracy") is None
    assert common_target([[row(1, 0.9)]], "accuracy") == 0.7  # 0.7 itself, not 0.69


def test_one_run_that_fails_does_not_make_the_target_worthless():
    failed = [row(1, 0.0)]  # mean 0.25
    assert common_target([ROWS, ROWS, ROWS, failed], "accuracy") == 0.7
    assert cost_to_reach(failed, 0.7) is None
