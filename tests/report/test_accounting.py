"""Costs to reach and to match, on runs whose figures are written down by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, Spent
from fedtailor.report.accounting import (
    Reached,
    best,
    course_of,
    matching,
    pareto,
    to_match,
    to_reach,
)


def records_of(values: list[float | None], macs: int = 10, sent: int = 6) -> list[RoundRecord]:
    """One record per value; None is a round without evaluation."""
    return [
        RoundRecord(
            number,
            training=Spent(sent, 2, macs),
            tiers=None if value is None else {"low": {"accuracy": 0.0}, "high": {"accuracy": value}},
        )
        for number, value in enumerate(values, start=1)
    ]


def test_costs_add_up_over_rounds_without_evaluation_too():
    course = course_of(records_of([None, 0.5, None, 0.7]))
    assert course == [Reached(2, 20, 16, 0.5), Reached(4, 40, 32, 0.7)]
    assert (course[1].flops, course[1].parameters) == (80, 8)
    assert course_of(records_of([0.5]), tier="low")[0].value == 0


def test_the_first_evaluation_at_the_target_counts():
    course = course_of(records_of([0.1, 0.6, 0.5, 0.6]))
    assert to_reach(course, 0.5).round == 2
    assert to_reach(course, 0.6).round == 2
    assert to_reach(course, 0.61) is None
    assert best(course).round == 2


def test_matching_the_best_of_another_run_is_a_difference():
    slow, quick = course_of(records_of([0.1, 0.4, 0.5, 0.5])), course_of(records_of([0.6], macs=12, sent=10))
    assert to_match(quick, slow) == {"rounds": -2, "flops": 24 - 60, "parameters": 3 - 6, "bytes": 12 - 24}
    assert to_match(slow, quick) is None


def test_only_runs_that_nobody_beats_twice_are_on_the_front():
    points = {
        "cheap": Reached(1, 10, 90, 1), "even": Reached(1, 50, 50, 1), "beaten": Reached(1, 60, 50, 1),
        "quiet": Reached(1, 90, 10, 1), "worst": Reached(1, 95, 95, 1),
    }  # fmt: skip
    assert pareto(points) == ["cheap", "even", "quiet"]


def test_matching_over_seeds_is_by_the_mean_and_below_zero_where_it_saves():
    slow = [records_of([0.2, 0.4, 0.6]), records_of([0.2, 0.6])]
    quick = [records_of([0.6, 0.8], macs=5), records_of([0.2, 0.8], macs=5)]
    first, second = matching({"quick": quick, "slow": slow})
    assert (first["method"], first["best"], first["round"]) == ("slow", 0.3, 2.5)  # the low tier has nothing
    assert "against" not in first
    assert (second["method"], second["against"]) == ("quick", "slow")
    flops = 2 * 10 - 2 * 25  # after two rounds instead of two and a half
    assert second["more"] == {"rounds": -0.5, "flops": flops, "parameters": -1, "bytes": -4}


def test_a_method_whose_mean_is_higher_has_matched_though_one_seed_alone_did_not():
    slow = [records_of([0.6]), records_of([0.6])]
    one_sided = [records_of([0.9]), records_of([0.5])]
    below, above = matching({"slow": slow, "one-sided": one_sided})
    assert above["best"] > below["best"]
    assert above["more"] == {"rounds": 0, "flops": 0, "parameters": 0, "bytes": 0}


def test_of_any_means_the_higher_one_has_matched_the_lower():
    """The rule of the page: a row above another never says that it did not reach it."""
    numbers = np.random.default_rng(0)
    methods = {f"m{n}": [records_of(list(numbers.random(4))) for _ in range(3)] for n in range(20)}
    table = matching(methods)
    assert [row["best"] for row in table] == sorted(row["best"] for row in table)
    assert all(row["more"] is not None for row in table[1:])


def test_a_small_loss_is_better_and_what_is_no_number_does_not_count():
    def losing(*losses):
        return [
            replace(record, tiers={"all": {"loss": loss}})
            for record, loss in zip(records_of([0.0] * len(losses)), losses, strict=True)
        ]

    worse, better = matching({"a": [losing(0.3, float("nan"))], "b": [losing(0.9, 0.5)]}, "loss")
    assert (worse["method"], worse["best"], better["best"]) == ("b", 0.5, 0.3)
    assert better["more"]["rounds"] == -1
    assert matching({"a": [losing(float("nan"))]}, "loss") == []


def test_bad_input_is_refused_by_name():
    with pytest.raises(FedtailorError, match="no round of this run has an evaluation"):
        course_of(records_of([None]))
    with pytest.raises(FedtailorError, match="tier 'middle' has no 'accuracy'"):
        course_of(records_of([0.5]), tier="middle")
