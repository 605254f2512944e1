"""What each method spent per client and tier, against figures that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedtailor.charts.panel import ReportedRun
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord, TierSpent
from fedtailor.report.fairness import (
    PerClient,
    above_budget,
    fairness_data,
    marks,
    not_recorded,
    spending,
    unequal_budgets,
)
from fedtailor.report.folders import read_runs
from fedtailor.report.page import page
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.report.panels.fairness import EQUAL, fairness
from fedtailor.report.tables import join_by_tier
from fedtailor.run.describing import describe
from fedtailor.server.setup import RoundSettings
from helpers import mlp_model, run, setup_of, vector_data
from synthetic_runs import write_runs

SMALL = TierSpent(bytes_down=100, bytes_up=80, macs=6000, asked=2, answered=2, examples=20, parameters=50)
LARGE = TierSpent(bytes_down=300, bytes_up=240, macs=36_000, asked=1, answered=1, examples=30, parameters=75)
ALLOWED = {"1/2": {"macs": 100, "bytes": 45, "params": 25}, "1": {"macs": 400, "bytes": 300, "params": 75}}


def rounds(*by_tier: dict[str, TierSpent]) -> list[RoundRecord]:
    return [RoundRecord(number, by_tier=each) for number, each in enumerate(by_tier, 1)]


def scaled(spent: TierSpent, **factors: float) -> TierSpent:
    return replace(spent, **{name: int(factor * getattr(spent, name)) for name, factor in factors.items()})


def test_means_are_over_clients_rounds_and_seeds():
    """Clients of tier 1/2: two and two in the first seed, one in the second; a million of them need no more."""
    one = TierSpent(bytes_down=60, bytes_up=40, macs=1000, asked=1, answered=1, examples=5, parameters=30)
    seeds = [rounds({"1/2": SMALL, "1": LARGE}, {"1/2": SMALL}), rounds({"1/2": one}, {"1": LARGE})]
    (found,) = spending({"heterofl": seeds}, {"heterofl": ALLOWED}).values()
    assert list(found) == ["1/2", "1"]
    small = found["1/2"]
    assert small.clients == 5 / 4
    assert small.macs == (6000 + 6000 + 1000) / 5
    assert small.bytes == (180 + 180 + 100) / 5
    assert small.parameters == (50 + 50 + 30) / 5
    assert small.of_budget["macs"] == pytest.approx(13_000 / 45 / 3 / 100)  # a step is three forward passes
    assert small.of_budget["bytes"] == pytest.approx(460 / 5 / (2 * 45))
    assert small.of_budget["parameters"] == pytest.approx(26 / 25)
    assert found["1"] == PerClient(
        2 / 4, 36_000, 540, 75, {"macs": 1.0, "bytes": 0.9, "parameters": 1.0}, of_others={}
    )


def test_clients_that_gave_no_update_do_not_make_a_method_look_cheap():
    """Three were asked, two of them answered: what was sent is shared by three, what was computed by two."""
    failed = replace(SMALL, asked=3, bytes_down=150, parameters=75)
    found = spending({"a": [rounds({"1": SMALL})], "b": [rounds({"1": failed})]})
    assert found["a"]["1"].macs == found["b"]["1"].macs == 3000
    assert found["a"]["1"].bytes == found["b"]["1"].bytes == 90
    assert (found["a"]["1"].clients, found["b"]["1"].clients) == (2, 3)
    assert unequal_budgets(found) == []


def test_tiers_keep_the_order_of_the_fleet_whoever_comes_first():
    found = spending({"a": [rounds({"1": LARGE}, {"1/2": SMALL})]}, {"a": ALLOWED})
    assert list(found["a"]) == ["1/2", "1"]


def test_a_method_that_spends_more_is_measured_by_the_middle_of_all():
    plain = {"0.2": SMALL, "0.4": SMALL, "0.6": SMALL, "1": LARGE}
    dear = {**plain, **{tier: scaled(plain[tier], macs=1.26) for tier in ("0.4", "0.6", "1")}}
    tiny = dict.fromkeys(plain, scaled(SMALL, macs=0.5, bytes_down=0.5, bytes_up=0.5, parameters=0.5))
    found = spending(
        {
            "fjord": [rounds(dear)],
            "heterofl": [rounds(plain)],
            "rolex": [rounds(plain)],
            "fedavg": [rounds(tiny)],
        }
    )
    assert found["fjord"]["0.4"].of_others == {"macs": 1.26, "bytes": 1.0, "parameters": 1.0}
    assert unequal_budgets(found) == [
        "fjord spends 1.26x the MACs of the others (tiers 0.4 to 1).",
        "fedavg spends 0.042x to 0.5x the MACs and 0.083x to 0.5x the bytes of the others (all tiers).",
    ]
    assert marks(found, "fjord", "0.4") == "1.26x the MACs of the others"
    assert marks(found, "fedavg", "0.4") == "0.5x the MACs and bytes of the others"
    assert marks(found, "heterofl", "0.4") == ""


def test_of_two_methods_the_dearer_one_is_named_and_the_other_is_what_it_is_measured_by():
    found = spending({"a": [rounds({"1": scaled(SMALL, bytes_up=1.5)})], "b": [rounds({"1": SMALL})]})
    assert unequal_budgets(found) == ["a spends 1.22x the bytes of b (tier 1)."]


@pytest.mark.parametrize(("factor", "told"), [(1.049, False), (1.051, True), (0.94, True), (0.96, False)])
def test_five_per_cent_are_rounding(factor, told):
    other = scaled(replace(SMALL, macs=1_000_000), macs=factor)
    same = [rounds({"1": replace(SMALL, macs=1_000_000)})]
    assert bool(unequal_budgets(spending({"a": same, "b": same, "c": [rounds({"1": other})]}))) is told


def test_methods_are_compared_over_the_rounds_that_all_of_them_have():
    """The second round has clients with twice the examples; a run that stopped before it is not thereby cheaper."""
    long = rounds({"1": SMALL}, {"1": scaled(SMALL, macs=2, examples=2)})
    found = spending({"a": [long], "b": [long[:1]]})
    assert found["a"]["1"].macs == found["b"]["1"].macs == 3000


def test_more_than_the_budget_is_told_less_is_not():
    found = spending({"fjord": [rounds({"1/2": scaled(SMALL, macs=1.2), "1": LARGE})]}, {"fjord": ALLOWED})
    assert above_budget(found) == ["fjord spends 1.2x the MACs of its budget (tier 1/2)."]
    assert marks(found, "fjord", "1/2") == "1.2x the MACs of its budget"
    assert marks(found, "fjord", "1") == ""  # 0.9 of the bytes
    assert unequal_budgets(found) == []


def test_runs_for_one_tier_each_cost_their_clients_all_of_them():
    runs = {"1/2": rounds({"1/2": SMALL, "1": LARGE}), "1": rounds({"1": scaled(LARGE, macs=2)})}
    (joined,) = join_by_tier(runs)
    assert joined.by_tier["1/2"] == SMALL
    assert joined.by_tier["1"] == replace(
        scaled(LARGE, macs=3, bytes_down=2, bytes_up=2, parameters=2), asked=1, answered=1, examples=30
    )


def test_what_a_budget_allows_is_the_piece_of_its_width_whatever_the_method_takes():
    """UniProb takes the full model: 84 parameters; half the width of 5 -> 8 -> 4 has 44 of them."""
    settings, data = RoundSettings(1, 5), vector_data((6, 5, 7, 4, 6))
    setup = setup_of(get_method("uniprob")(), mlp_model(), data, "uniform-2", settings, 0)
    half, whole = (tier["allowed"] for tier in describe(setup)["tiers"])
    assert half == {"macs": 6 * 4 + 5 * 4, "params": 5 * 4 + 4 + 4 * 4 + 4, "bytes": 4 * 44}
    assert whole["params"] == 5 * 8 + 8 + 8 * 4 + 4
    (record,) = run(setup.method, setup.model, data, "uniform-2").records
    found = spending({"uniprob": [[record]]}, {"uniprob": {"0.5": half, "1": whole}})["uniprob"]
    assert found["0.5"].of_budget == pytest.approx({"macs": 1.0, "bytes": 84 / 44, "parameters": 84 / 44})
    assert found["1"].of_budget == pytest.approx({"macs": 1.0, "bytes": 1.0, "parameters": 1.0})
    ranged = replace(
        setup, fleet=setup_of(setup.method, setup.model, data, "flops-0.3-1.0", settings, 0).fleet
    )
    assert [tier["allowed"] for tier in describe(ranged)["tiers"]] == [{}] * 5


def reported(variant: str, by_tier: dict[str, TierSpent], seed: int = 1, **config) -> ReportedRun:
    setup = {"tiers": [{"name": tier, "allowed": ALLOWED[tier]} for tier in ALLOWED]}
    records = rounds(by_tier, by_tier)
    return ReportedRun(variant, "", seed, variant, "finished", "x", records, setup, config)


def test_the_section_says_in_words_who_was_given_more_and_what_differs_in_the_settings():
    training = {"training": {"lr": 0.1}}
    dear = {"1/2": scaled(SMALL, macs=1.5), "1": LARGE}
    runs = [reported("a", {"1/2": SMALL, "1": LARGE}, **training), reported("b", dear, training={"lr": 0.2})]
    panel = fairness(runs)
    assert (panel.key, panel.title) == ("fairness", "Fairness")
    assert "b spends 1.5x the MACs of a and of its budget (tier 1/2).\n" in panel.text
    assert "b differs from the others in: lr = 0.2 (others: 0.1).\n" in panel.text
    assert EQUAL not in panel.text
    ((_, rows),) = panel.tables
    assert [(row["method"], row["tier"], row["unequal"]) for row in rows] == [
        ("a", "1/2", ""), ("b", "1/2", "1.5x the MACs of a"), ("a", "1", ""), ("b", "1", ""),
    ]  # fmt: skip
    assert (rows[0]["MACs"], rows[0]["bytes"], rows[0]["parameters"]) == ("3 k", "90 B", "25")
    assert [row["MACs of budget"] for row in rows] == ["1x", "1.5x", "1x", "1x"]
    (chart,) = panel.charts
    assert [row["macs"] for row in chart.data] == [1, 1, 1.5, 1]
    assert page("x", [panel]).count('<section id="fairness"') == 1


def test_equal_budgets_are_said_to_be_equal_and_nothing_is_drawn():
    same = {"1/2": SMALL, "1": LARGE}
    panel = fairness([reported("a", same), reported("b", same), reported("b", same, seed=2)])
    assert EQUAL in panel.text
    assert (panel.charts, [row["unequal"] for row in panel.tables[0][1]]) == ([], [""] * 4)


def test_runs_of_an_earlier_version_are_told_and_what_differs_is_told_once(tmp_path):
    write_runs(tmp_path, rounds=3, seeds=1, methods={"fjord": 0.9, "heterofl": 0.9})
    for name, rate in (("fjord", "0.1"), ("heterofl", "0.2")):
        with (tmp_path / f"{name}-seed1/config.toml").open("a") as file:
            file.write(f"[training]\nlr = {rate}\n")
    panels = {each.key: each for each in all_panels(read_runs([tmp_path]))}
    text = panels["fairness"].text
    assert "fjord: made before it was recorded what each tier spends." in text
    assert panels["fairness"].tables == []
    assert [key for key, each in panels.items() if "differs from the others in: lr" in each.text] == [
        "fairness"
    ]


def test_an_old_run_does_not_hide_what_the_others_spent():
    new = reported("a", {"1": LARGE})
    old = replace(new, variant="old", records=[RoundRecord(1)])
    results = {"a": [new.records], "old": [old.records]}
    assert not_recorded(results) == ["old"]
    assert list(spending(results)) == ["a"]
    data = fairness_data(results, {"a": ALLOWED})
    panel = fairness([new, replace(new, variant="b"), old])
    assert "old: made before it was recorded" in panel.text
    assert EQUAL not in panel.text  # nobody knows
    assert (data["unequal"], data["above_budget"], data["not_recorded"]) == ([], [], ["old"])
    assert data["methods"]["a"]["1"]["macs"] == 36_000
