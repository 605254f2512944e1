"""What a target cost, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, Spent, headline
from fedtailor.report.targets import common_target, cost_to_reach, last_evaluation, spent_until


def record(round, accuracy=None, sent=10, macs=100, metric="accuracy"):
    scores = {"a": {"loss": 1.0, metric: accuracy}, "b": {"loss": 1.0, metric: 0.5}}
    training = Spent(bytes_down=sent, bytes_up=1, macs=macs)
    return RoundRecord(round, training=training, tiers=None if accuracy is None else scores)


RECORDS = [
    record(1),
    record(2, 0.3),
    record(3),
    record(4, 0.9),
    record(5, 0.7),
]  # mean over tiers: 0.4, 0.7, 0.6


def test_spending_adds_up_over_rounds():
    assert spent_until(RECORDS)[2] == Spent(30, 3, 300)


def test_measuring_is_paid_for_too():
    measured = [replace(each, measuring=Spent(5, 2, 30)) for each in RECORDS]
    assert spent_until(measured)[2] == Spent(45, 9, 390)
    assert cost_to_reach(measured, 0.4, "accuracy") == {"rounds": 2, "bytes": 36, "macs": 260}


def test_the_last_evaluation_is_not_always_that_of_the_last_round():
    assert last_evaluation([*RECORDS, record(6)])["a"]["accuracy"] == 0.7
    with pytest.raises(FedtailorError, match="no round of this run has an evaluation"):
        last_evaluation([record(1)])


@pytest.mark.parametrize(("target", "rounds"), [(0.4, 2), (0.41, 4), (0.7, 4), (0.71, None)])
def test_the_first_evaluation_that_is_good_enough_counts(target, rounds):
    found = cost_to_reach(RECORDS, target, "accuracy")
    assert (found and found["rounds"]) == rounds
    if rounds:
        assert found == {"rounds": rounds, "bytes": 11 * rounds, "macs": 100 * rounds}


def test_less_is_better_for_losses_and_errors():
    records = [record(1, 0.9, metric="perplexity"), record(2, 0.2, metric="perplexity")]
    assert headline(last_evaluation(records)) == "perplexity"
    assert cost_to_reach(records, 0.4, "perplexity")["rounds"] == 2
    assert cost_to_reach(records, 0.3, "perplexity") is None


def test_the_common_target_is_one_that_most_runs_reached():
    other = [record(1, 0.858)]  # mean 0.679
    assert common_target([RECORDS, other], "accuracy") == 0.67
    assert all(cost_to_reach(records, 0.67, "accuracy") for records in (RECORDS, other))
    assert common_target([RECORDS, [record(1)]], "accuracy") is None
    assert common_target([[record(1, float("nan"))]], "accuracy") is None
    assert common_target([[record(1, 0.9)]], "accuracy") == 0.7  # 0.7 itself, not 0.69


def test_one_run_that_fails_does_not_make_the_target_worthless():
    failed = [record(1, 0.0)]  # mean 0.25
    assert common_target([RECORDS, RECORDS, RECORDS, failed], "accuracy") == 0.7
    assert cost_to_reach(failed, 0.7, "accuracy") is None
