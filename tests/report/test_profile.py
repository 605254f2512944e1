"""The profile of a network: its cost curve, the cut that fits a budget and what binds it, as data and as text."""

from __future__ import annotations

import json
from fractions import Fraction
from io import StringIO

import pytest
import torch
from rich.console import Console

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import fit
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.models import build_model
from fedtailor.report.profile import Profile, profile, profile_view


@pytest.fixture(scope="module")
def model() -> ElasticModel:
    module = build_model("femnist-cnn", input_shape=(1, 28, 28), num_classes=62)
    return elastic(module, (torch.zeros(2, 1, 28, 28), torch.arange(2)))


def text(result: Profile) -> str:
    console = Console(file=StringIO(), width=140)
    console.print(profile_view(result, "femnist-cnn"))
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


def test_the_curve_is_what_the_model_costs(model: ElasticModel) -> None:
    result = profile(model, widths=(Fraction(1, 5), Fraction(1)), workload=Workload(8, 1))
    assert [row.cost.macs for row in result.rows] == [47_038, 490_942]
    for row in result.rows:
        assert row.cost == model.cost(prefix(model.groups, row.width), Workload(8, 1))
        assert row.broken == ()
    assert result.rows[0].load == pytest.approx(47_038 / 490_942)
    assert result.fitted is None
    assert result.refusal == ""
    assert "fits" not in text(result)
    assert "batches of 8, 1 number(s) of optimiser state per parameter" in text(result)


def test_the_fitted_cut_and_the_binding_limit(model: ElasticModel) -> None:
    budget = Budget.parse("macs=200k,memory=1MB")
    result = profile(model, budget)
    assert result.fitted is not None
    assert result.fitted.cut == fit(model.costs, budget)
    assert result.fitted.binding == ("memory",)
    assert result.width == Fraction(2, 5)
    assert result.channels == {"features.0": (4, 10), "features.3": (8, 20)}
    assert [row.broken for row in result.rows[3:6]] == [(), ("memory",), ("macs", "memory")]
    shown = text(result)
    assert "fits: width 0.4: macs 119.6 k (59.8 % of 200 k), memory 846.3 kB (84.6 % of 1 MB)" in shown
    assert "binding limit: memory" in shown
    assert "* estimated for training on batches of 32" in shown


def test_everything_is_plain_data(model: ElasticModel) -> None:
    data = json.loads(json.dumps(profile(model, Budget(macs="200k", params="50%")).as_data()))
    assert data["limits"] == {"macs": "200 k", "params": "50 %"}
    assert data["allowed"] == {"macs": 200_000, "params": 12_591}
    assert data["fitted"]["width"] == "1/2"
    assert data["fitted"]["macs"] == 165_502
    assert data["fitted"]["binding"] == ["macs", "params"]
    assert data["fitted"]["channels"] == {"features.0": [5, 10], "features.3": [10, 20]}
    assert data["curve"][-1] == {
        "width": "1",
        "params": 25_182,
        "macs": 490_942,
        "bytes": 100_728,
        "memory": data["curve"][-1]["memory"],
        "breaks": ["macs", "params"],
    }
    assert data["refusal"] is None


def test_nothing_fits(model: ElasticModel) -> None:
    result = profile(model, Budget(params=10))
    assert result.fitted is None
    assert result.refusal.startswith(
        "no cut fits: params is limited to 10, but the smallest cut of this model"
    )
    assert "over 10x" in text(result)
    assert "no cut fits" in text(result)
    data = result.as_data()
    assert data["fitted"] is None
    assert data["refusal"] == result.refusal


def test_groups_of_different_widths_are_listed(model: ElasticModel) -> None:
    result = profile(model, Budget(macs="200k"), family="per_group")
    assert "channels: features.0 6/10, features.3 10/20" in text(result)
    assert "fits: width 8/15 (0.533)" in text(result)


def test_a_width_binds_and_the_full_model_is_free(model: ElasticModel) -> None:
    narrow = profile(model, Budget(width="1/2", macs=1))
    assert "binding limit: width" in text(narrow)
    assert narrow.rows[-1].broken == ("width",)
    assert "no limit binds: the full model fits" in text(profile(model, Budget(macs=1)))


def test_step_times_are_measured_when_asked_for(model: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedtailor.elasticity.costing.model_costs.step_time",
        lambda model, cut, workload: 100_000 * model.costs.counts(cut)[0],
    )
    timed = profile(model, Budget(step_time="60%"))
    assert [row.cost.step_time for row in timed.rows[:2]] == [100_000, 200_000]
    assert timed.width == Fraction(3, 5)
    assert "step_time 600 µs (100 % of 600 µs)" in text(timed)
    assert "step time" in text(profile(model, timed=True))
    assert "step time" not in text(profile(model))
