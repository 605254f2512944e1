"""``method.align = "auto"``: a run measures once, says what it takes, and goes on with that."""

from __future__ import annotations

import json
import tomllib
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor
from fedtailor.attacks.attack import Attack
from fedtailor.attacks.trial import trial
from fedtailor.config import make_config
from fedtailor.elasticity.costing.grid import Grid
from fedtailor.errors import FedtailorError
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.run import setup
from fedtailor.run.interface import resume, run_config
from fedtailor.sweep.plan import make_plan
from tests.helpers import differing

SMALL: dict[str, Any] = {
    "rounds": 3,
    "clients_per_round": 2,
    "evaluate_every": 3,
    "data": {"dataset": "digits", "clients": 6, "limit": 120},
    "model": {"name": "mlp", "hidden": [24]},
    "engine": {"workers": 0},
}


@pytest.fixture
def measured(monkeypatch):
    """What the machine says, and how often it was asked."""
    asked: list[int] = []
    answers = [8, 4, 2, 1]

    def found(costs, workload) -> Grid:
        asked.append(answers[len(asked)])
        return Grid(asked[-1], {1: 1.0, asked[-1]: 0.7})

    monkeypatch.setattr(setup, "fastest_grid", found)
    return asked


def test_a_run_writes_down_what_it_measured_and_goes_on_with_it(tmp_path, measured):
    def stop(record: Any) -> None:
        if record.round == 1:
            raise InterruptedError

    told: list[str] = []
    config = make_config({**SMALL, "method": {"name": "heterofl", "align": "auto"}})
    with pytest.raises(InterruptedError):
        run_config(config, tmp_path / "auto", on_round=stop, on_notice=told.append)
    assert any(each.startswith('align = "auto" takes 8: ') for each in told)
    assert tomllib.loads((tmp_path / "auto" / "config.toml").read_text())["method"]["align"] == 8
    run = resume(tmp_path / "auto")
    assert (run.method.align, measured) == (8, [8])
    said = make_config({**SMALL, "method": {"name": "heterofl", "align": 8}})
    named = run_config(said, tmp_path / "named", on_notice=lambda _: None)
    assert differing(run.state.weights, named.state.weights) == set()
    assert {len(units) for units in run.deploy(run.fleet.tiers[0].budget).cut.channels.values()} == {8}


def test_from_python_it_goes_on_with_what_was_measured_first(tmp_path, measured):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    data, method = {"dataset": "digits", "clients": 6, "limit": 120}, {"name": "heterofl", "align": "auto"}
    given: dict[str, Any] = {
        "rounds": 2,
        "engine": {"workers": 0},
        "progress": False,
        "folder": tmp_path / "run",
    }
    with pytest.warns(UserWarning, match='align = "auto" takes 8'):
        first = fedtailor.train(module, data, "uniform-5", method, **given)
    assert json.loads((tmp_path / "run" / "setup.json").read_text())["aligned"] == 8
    again = fedtailor.train(module, data, "uniform-5", method, **given, resume=True)
    assert (first.method.align, again.method.align, measured) == (8, 8, [8])


def test_what_auto_takes_has_the_grid_too(tmp_path, measured):
    config = make_config({**SMALL, "method": {"name": "auto", "align": "auto"}})
    run = run_config(config, tmp_path / "auto", on_notice=lambda _: None)
    assert run.method.align == 8
    assert tomllib.loads((tmp_path / "auto" / "config.toml").read_text())["method"]["align"] == 8


def test_a_comparison_wants_a_number(tmp_path, measured):
    file = tmp_path / "run.toml"
    file.write_text('rounds = 1\n[data]\ndataset = "digits"\nclients = 10\n[model]\nname = "mlp"\n')
    sentence = "method.align = 'auto': expected a number in a comparison, the same for all runs"
    with pytest.raises(FedtailorError, match=sentence):
        make_plan(file, "heterofl:align=auto,fedavg", 1, [], [], tmp_path / "runs")
    with pytest.raises(FedtailorError, match=sentence):
        fedtailor.compare("mlp", "digits", methods=["heterofl:align=auto"], rounds=1, progress=False)
    assert measured == []


def test_what_cannot_be_trained_is_refused_before_it_is_measured(measured):
    data = {"dataset": "digits", "clients": 6, "limit": 120}
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(10))
    module(torch.zeros(2, 1, 8, 8))
    with pytest.raises(FedtailorError, match="training.batch_size = 1: batch norm needs at least 2"):
        fedtailor.train(
            module,
            data,
            "uniform-5",
            {"name": "heterofl", "align": "auto"},
            rounds=1,
            training={"batch_size": 1},
        )
    assert measured == []


def test_a_trial_of_attacks_wants_a_number(measured):
    config = make_config({**SMALL, "method": {"name": "heterofl", "align": "auto"}})
    with pytest.raises(FedtailorError, match="method.align = 'auto': expected a number in a comparison"):
        next(iter(trial(config, Attack("sign-flip"), [{"rule": "median"}])))


@pytest.mark.parametrize("settled", [{"align": "auto"}, {"widths": "fleet"}])
def test_a_loaded_run_with_a_method_at_hand_is_settled_as_it_was(tmp_path, measured, settled):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    data, tiers = (
        {"dataset": "digits", "clients": 6, "limit": 120},
        [{"width": "1/3", "share": 1}, {"width": 1, "share": 1}],
    )
    method = FjORD(**{"widths": ("1/3", 1), **settled})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was measured is told
        run = fedtailor.train(
            module,
            data,
            tiers,
            method,
            rounds=1,
            engine={"workers": 0},
            progress=False,
            folder=tmp_path / "run",
        )
        again = fedtailor.Run.load(tmp_path / "run", module=module, method=method)
    assert (again.method.align, again.method.candidates) == (run.method.align, run.method.candidates)
    assert again.submodel(Fraction(1, 3)) is not None
    assert len(measured) <= 1


@pytest.mark.parametrize("value", ["fast", 0, -8, 1.5])
def test_what_is_no_grid_is_refused(value):
    with pytest.raises(FedtailorError, match=r"method.align"):
        make_config({**SMALL, "method": {"name": "heterofl", "align": value}})
