"""What a target cost, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer.main

from fedtailor.cli.main import app
from fedtailor.errors import FedtailorError
from fedtailor.record import RoundRecord, Spent, headline
from fedtailor.report.comparison import Known, comparison_data, comparison_tables, costs_to_reach
from fedtailor.report.targets import (
    REACHED,
    USUAL_TARGET,
    common_target,
    cost_to_reach,
    guessing,
    last_evaluation,
    spent_until,
)


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
    assert cost_to_reach([measured], 0.4, "accuracy") == {"rounds": 2, "bytes": 36, "macs": 260}


def test_the_last_evaluation_is_not_always_that_of_the_last_round():
    assert last_evaluation([*RECORDS, record(6)])["a"]["accuracy"] == 0.7
    with pytest.raises(FedtailorError, match="no round of this run has an evaluation"):
        last_evaluation([record(1)])


@pytest.mark.parametrize(("target", "rounds"), [(0.4, 2), (0.41, 4), (0.6, 4), (0.61, None), (0.7, None)])
def test_the_first_evaluation_that_is_good_enough_counts(target, rounds):
    """From 0.61 on it was there in round 4 and is no longer so at the end."""
    found = cost_to_reach([RECORDS], target, "accuracy")
    assert (found and found["rounds"]) == rounds
    if rounds:
        assert found == {"rounds": rounds, "bytes": 11 * rounds, "macs": 100 * rounds}


def test_a_target_is_reached_by_the_mean_over_seeds():
    """One seed is far above it from the start, the other never: what decides is their mean."""
    good, bad = [record(1, 0.9), record(2, 0.9)], [record(1, 0.0), record(2, 0.3)]  # 0.7, 0.7 and 0.25, 0.4
    assert cost_to_reach([good, bad], 0.6, "accuracy") is None
    assert cost_to_reach([good, bad], 0.55, "accuracy") == {"rounds": 2, "bytes": 22, "macs": 200}
    found = costs_to_reach({"lucky": [good, bad], "steady": [good, good]}, 0.6, "accuracy")
    assert found["lucky"] == {"reached": False, "seeds_reached": 1, "seeds": 2}
    assert found["steady"] == {
        "reached": True, "seeds_reached": 2, "seeds": 2, "rounds": 1, "bytes": 11, "macs": 100, "flops": 200,
    }  # fmt: skip


def test_a_seed_that_stopped_early_counts_with_what_it_ended_with():
    short, long = [record(1, 0.5)], [record(1, 0.1), record(2, 0.7)]  # 0.5; 0.3, 0.6
    assert cost_to_reach([short, long], 0.55, "accuracy") == {"rounds": 1.5, "bytes": 16.5, "macs": 150}


def test_less_is_better_for_losses_and_errors():
    records = [record(1, 0.9, metric="perplexity"), record(2, 0.2, metric="perplexity")]
    assert headline(last_evaluation(records)) == "perplexity"
    assert cost_to_reach([records], 0.4, "perplexity")["rounds"] == 2
    assert cost_to_reach([records], 0.3, "perplexity") is None
    other = [record(1, 0.3, metric="perplexity")]
    assert common_target({"a": [records], "b": [other]}, "perplexity") == 0.4


def test_the_common_target_is_one_that_more_than_half_of_the_methods_reach():
    results = {"a": [RECORDS], "b": [[record(1, 0.858)]]}  # 0.6 and 0.679 at the end
    assert common_target(results, "accuracy") == 0.6
    assert all(each["reached"] for each in costs_to_reach(results, 0.6, "accuracy").values())
    assert common_target({"a": [RECORDS], "b": [[record(1)]]}, "accuracy") is None
    assert common_target({"a": [[record(1, float("nan"))]]}, "accuracy") is None
    assert common_target({"a": [[record(1, 0.9)]]}, "accuracy") == 0.7  # 0.7 itself, not 0.69


def test_one_method_that_fails_does_not_make_the_target_worthless():
    failed = [record(1, 0.0)]  # mean 0.25
    results = {"a": [RECORDS], "b": [RECORDS], "failed": [failed]}
    assert common_target(results, "accuracy") == 0.6
    assert not costs_to_reach(results, 0.6, "accuracy")["failed"]["reached"]


def test_no_target_is_hardly_better_than_guessing():
    results = {"a": [[record(1, -0.22)]], "b": [[record(1, -0.1)]]}  # 14 and 20 %
    assert common_target(results, "accuracy") == 0.14
    assert common_target(results, "accuracy", guess=0.1) is None
    assert common_target(results, "accuracy", guess=0.04) == 0.14
    tables = [
        each for each in comparison_tables("", results, None, Known(guess=0.1)) if hasattr(each, "caption")
    ]
    assert tables[1].title == "Cost in all"
    assert "below 19 %, too near to the 10 % of guessing. --target X" in tables[1].caption
    assert "no_target" in comparison_data(results, None, 0.1)
    given = comparison_data(results, 12, 0.1)  # a user may ask for what they like
    assert (given["target"], "no_target" in given) == (0.12, False)
    rows = [{"label_counts": [8, 1, 1]}, {"label_counts": [4, 3, 3]}]
    assert guessing({"data": {"rows": rows}}) == 0.6
    assert guessing({"data": {"rows": [{"examples": 3}]}}) is None


def test_a_method_that_stands_alone_is_not_measured_by_itself():
    assert comparison_data({"a": [RECORDS]})["target"] is None
    assert comparison_data({"a": [RECORDS]}, 50)["to_target"]["a"]["reached"]


def test_heads_name_the_target():
    (table,) = [
        each.table
        for each in comparison_tables("", {"a": [RECORDS], "b": [RECORDS]})
        if getattr(each, "title", "").startswith("Cost")
    ]
    heads = [str(column.header) for column in table.columns]
    assert heads[1:] == [
        "FLOPs\nin all", "time\nin all", "rounds\nto 60.0 %", "sent\nto 60.0 %", "FLOPs\nto 60.0 %",
        "seeds\nto 60.0 %",
    ]  # fmt: skip


def test_one_rule_is_stated_where_the_figure_is_in_the_help_and_in_the_docs():
    tables = comparison_tables("title", {"a": [RECORDS], "b": [RECORDS]})
    assert REACHED in [getattr(table, "caption", "") for table in tables]
    commands = typer.main.get_command(app).commands
    for name in ("compare", "report"):
        (help,) = [each.help for each in commands[name].params if each.name == "target"]
        assert REACHED in help
        assert USUAL_TARGET in help
    page = (Path(__file__).parents[2] / "docs/compare-and-report.md").read_text(encoding="utf-8")
    assert f"{REACHED} {USUAL_TARGET}" in page
