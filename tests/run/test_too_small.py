"""A device that no piece of the model fits: named, or left out and counted."""

from __future__ import annotations

from typing import Any

import pytest

import fedtailor
from commands import call, small_config
from fedtailor.errors import FedtailorError
from fedtailor.run.describing import describe
from fedtailor.run.summary import run_summary
from helpers import cnn_model, image_data, tiny_cnn

QUICK: dict[str, Any] = {"rounds": 2, "evaluate_every": 1, "engine": {"workers": 0}}
TIERS = [
    {"name": "phone", "width": 0.5, "share": 2},
    {"name": "board", "macs": 50, "share": 3},  # the smallest cut needs 217
    {"name": "server", "width": 1},
]


def train(fleet: Any, method: str = "heterofl", **settings: Any) -> fedtailor.Run:
    return fedtailor.train(tiny_cnn(), image_data((4,) * 6), fleet, method, **{**QUICK, **settings})


@pytest.mark.parametrize("method", ["heterofl", "fjord", "fedrolex", "efd", "splitmix"])
def test_the_tier_is_named(method):
    with pytest.raises(FedtailorError) as caught:
        train(TIERS, method)
    assert str(caught.value).startswith("tier 'board' (3 clients): ")
    assert str(caught.value).endswith('; fleet.too_small = "skip" goes on without it')


def test_a_limit_that_the_method_does_not_know_is_refused_before_pieces_are_looked_for():
    with pytest.raises(FedtailorError, match="ofa-fl does not keep to a limit on macs"):
        train(TIERS, "ofa-fl")


@pytest.mark.parametrize("method", ["heterofl", "fjord", "apfl"])
def test_the_others_go_on_as_who_they_are(method):
    run = train({"tiers": TIERS, "too_small": "skip"}, method)
    assert list(run.tiers) == ["phone", "server"]
    clients = run.setup.clients(0)
    assert [(client.id, client.tier) for client in clients] == [(0, "phone"), (1, "phone"), (5, "server")]
    assert [record.cohort.too_small for record in run.history] == [3, 3]
    assert run.history[0].as_row()["too_small"] == 3
    assert run.setup.settings.clients_per_round == 3
    assert run.history[0].cohort.asked == (
        1 if method == "apfl" else 3
    )  # APFL starts with those that can do all
    told = {"tiers": ["board"], "clients": 3}
    assert run_summary(run)["too_small"] == describe(run.setup)["too_small"] == told


def test_how_often_is_evaluated_is_settled_for_those_that_are_left():
    run = train({"tiers": TIERS, "too_small": "skip"}, evaluate_every="auto")
    assert run.setup.settings.evaluate_every in (1, 2)


def test_who_is_left_out_may_change_from_round_to_round():
    run = train({"tiers": TIERS, "too_small": "skip", "capacity": "dynamic"}, rounds=4)
    counts = [record.cohort.too_small for record in run.history]
    assert len(set(counts)) > 1
    assert all(
        record.cohort.asked == min(6, 6 - count) for record, count in zip(run.history, counts, strict=True)
    )


def test_of_a_range_those_are_left_out_whose_own_budget_pays_for_nothing():
    run = train({"name": "flops-0.01-0.9", "too_small": "skip"})
    model, shares = cnn_model(), run.fleet.capacity(run.data.sizes, 0, run.setup.seeds)
    for client in range(6):
        able = client in [each.id for each in run.setup.clients(0)]
        budget = fedtailor.Budget(macs=float(shares.macs[client]))
        fits = True
        try:
            model.fit(budget)
        except FedtailorError:
            fits = False
        assert able == fits
    with pytest.raises(FedtailorError, match="tier '0.01 flops': no cut fits"):
        train("flops-0.01-0.9")


def test_a_fleet_of_which_nothing_is_left_is_refused():
    with pytest.raises(FedtailorError, match="tier 'board' .6 clients.: no cut fits"):
        train({"tiers": TIERS[1:2], "too_small": "skip"})
    with pytest.raises(FedtailorError, match="fleet.too_small = 'skipp'"):
        train({"tiers": TIERS, "too_small": "skipp"})


def test_rows_of_other_runs_do_not_speak_of_it():
    assert "too_small" not in train("uniform-2", rounds=1).history[0].as_row()


def test_the_command_counts_them_too(tmp_path, monkeypatch, capsys):
    tiers = "fleet.tiers=[{name = 'board', macs = 50}, {name = 'phone', width = 0.5}]"
    words = ["run", str(small_config(tmp_path, rounds=1)), "--runs", str(tmp_path / "runs"), "--set", tiers]
    words += ["--set", "engine.workers=0", "--set", "method.name=heterofl"]
    assert call(monkeypatch, *words) == 2
    assert "tier 'board' (3 clients): no cut fits" in capsys.readouterr().err
    assert call(monkeypatch, *words, "--set", "fleet.too_small=skip") == 0
    assert "Left out, because no piece fits: 3 clients (tier board)" in capsys.readouterr().out
