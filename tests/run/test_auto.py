"""``method.name = "auto"``: which method is taken, what supports it, and that the run is the one of that method."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedtailor
from fedtailor.cli.compare import plan_rules
from fedtailor.config import load_config, make_config, to_toml
from fedtailor.errors import FedtailorError
from fedtailor.fleet.presets import build_fleet
from fedtailor.merging.settings import ServerSettings
from fedtailor.methods.auto import Auto
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.registry import get_method, method_names
from fedtailor.methods.tailor.tailor import Tailor
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.run.auto.choosing import taken
from fedtailor.run.auto.rules import RULES, Seen, decide
from fedtailor.run.interface import resume, run_config
from fedtailor.run.setup import prepare_config
from fedtailor.storage.run_folder import RunFolder
from fedtailor.sweep.plan import is_same, make_plan
from helpers import differing

ROOT = Path(__file__).parents[2]
FIFTHS = tuple(Fraction(number, 5) for number in range(1, 6))
SMALL = {
    "rounds": 3, "clients_per_round": 2, "evaluate_every": 1, "engine": {"workers": 0},
    "data": {"dataset": "digits", "clients": 6, "limit": 90}, "model": {"name": "mlp", "hidden": [12, 12]},
}  # fmt: skip


def seen(**changes: Any) -> Seen:
    usual = {
        "statistics": False, "limits": frozenset({"width"}), "widths": FIFTHS,
        "smallest_share": Fraction(1, 5),
    }  # fmt: skip
    return Seen(**{**usual, **changes})


# Rules


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"name": "tailor"}),
        ({"widths": (Fraction(1, 2),)}, {"name": "fedavg", "width": "1/2"}),
        ({"widths": (Fraction(1, 2),), "all_fit": False}, {"name": "tailor"}),
        ({"smallest_share": Fraction(3, 5)}, {"name": "tailor"}),
        ({"limits": frozenset({"macs"})}, {"name": "tailor"}),
        ({"limits": frozenset({"params", "macs"})}, {"name": "tailor"}),
        ({"limits": frozenset({"width", "memory"})}, {"name": "heterofl", "scaler": False}),
        ({"limits": frozenset({"memory"}), "statistics": True}, {"name": "heterofl", "label_rows": False}),
        ({"limits": frozenset({"density"}), "widths": ()}, {"name": "fiarse", "layerwise": True}),
        ({"limits": frozenset({"depth"}), "widths": ()}, {"name": "depthfl"}),
    ],
)
def test_what_is_taken_and_that_a_method_takes_these_settings(changes, expected):
    table, why = decide(seen(**changes))
    assert expected.items() <= table.items()
    assert why.startswith(f"method auto takes {table['name']}")
    get_method(table["name"])(**{key: value for key, value in table.items() if key != "name"})


def test_without_records_it_says_so_and_with_norms_too():
    assert decide(seen(limits=frozenset({"depth"}), widths=()))[1].endswith(
        "(no recorded run decides this yet)"
    )
    assert "of these networks, CIFAR-10's has batch norm" in decide(seen(statistics=True))[1]
    assert "batch norm" not in decide(seen())[1]


def test_every_figure_of_a_rule_stands_on_the_page_of_the_paper_that_it_names():
    for rule in RULES:
        paper = re.match(r"reproduce/(\w+)", rule.shown_by)
        figures = re.findall(r"[-+]?\d+\.\d(?: ± \d+\.\d)?", rule.shown_by)
        assert bool(paper) == bool(figures)
        if paper:
            pages = [
                ROOT / "docs" / page for page in (f"methods/{paper[1]}.md", "which-method.md", "results.md")
            ]
            text = "".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
            assert [figure for figure in figures if figure not in text.replace("−", "-")] == []


def test_the_documented_table_is_that_of_the_code():
    page = (ROOT / "docs" / "choosing-a-method.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.count(" | ") == 3 and "---" not in line][
        1:
    ]
    assert [row[2] for row in rows] == [rule.why for rule in RULES]
    assert [row[3].removesuffix(" |") for row in rows] == [
        rule.shown_by or "no recorded run yet" for rule in RULES
    ]


def test_it_is_no_method_itself():
    assert "auto" not in method_names()
    with pytest.raises(
        FedtailorError, match="method.norm = 'static': expected nothing with method.name = 'auto'"
    ):
        make_config({"method": {"name": "auto", "norm": "static"}})
    with pytest.raises(FedtailorError, match="unknown method 'autoo'"):
        make_config({"method": {"name": "autoo"}})


# Runs


def test_a_run_says_what_it_took_and_is_the_run_of_that_method(tmp_path):
    told: list[str] = []
    config = make_config({**SMALL, "method": {"name": "auto"}, "fleet": {"name": "a1-c1"}})
    run = run_config(config, tmp_path / "auto", on_notice=told.append)
    (why,) = (each for each in told if each.startswith("method auto takes "))
    assert why.startswith("method auto takes tailor: most devices")
    written = tomllib.loads((tmp_path / "auto" / "config.toml").read_text())
    assert (written["method"]["name"], written["server"]["momentum"]) == ("tailor", 0.5)
    chosen = json.loads((tmp_path / "auto" / "setup.json").read_text())["chosen"]
    assert chosen["why"] == why
    named = run_config(
        make_config({**SMALL, "method": chosen["method"], "fleet": {"name": "a1-c1"}}), tmp_path / "named"
    )
    assert differing(run.state.weights, named.state.weights) == set()
    panels = {panel.key: panel for panel in all_panels(read_runs([tmp_path / "auto"]))}
    assert f": {why}." in panels["answer"].text


@pytest.mark.parametrize(
    ("said", "momentum", "average"),
    [({}, 0.5, 0.0), ({"momentum": 0.0}, 0.0, 0.0), ({"average": 0.5}, 0.5, 0.5)],
)
def test_the_server_is_that_of_what_is_taken_but_for_what_is_said(said, momentum, average, tmp_path):
    """Also where a default of any method is said, and where a config travels as text to another process."""
    config = make_config({**SMALL, "rounds": 1, "method": {"name": "auto"}, "server": said})
    file = tmp_path / "there.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    for each in (config, load_config(file)):
        server = prepare_config(each).method.server
        assert (server.momentum, server.average) == (momentum, average)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    data = {"dataset": "digits", "clients": 4, "limit": 60}
    with pytest.warns(UserWarning, match="method auto takes tailor"):
        run = fedtailor.train(module, data, "uniform-2", "auto", rounds=1, server=said, progress=False)
    assert (run.method.server.momentum, run.method.server.average) == (momentum, average)


@pytest.mark.parametrize(
    ("said", "momentum"), [(None, 0.5), ({"momentum": 0.9}, 0.9), ({"momentum": 0}, 0.0)]
)
def test_what_is_said_of_the_server_reaches_it_in_every_way_to_call(said, momentum, tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    data = {"dataset": "digits", "clients": 4, "limit": 60}
    given = {"rounds": 1, "progress": False, "server": said}
    with pytest.warns(UserWarning, match="method auto takes tailor"):
        found = fedtailor.compare(module, data, "uniform-2", ["auto"], engine={"workers": 0}, **given)
    (run,) = found.runs["auto"]
    assert run.method.server.momentum == momentum
    with pytest.warns(UserWarning, match="method auto takes tailor"):
        assert fedtailor.train(module, data, "uniform-2", Auto(), **given).method.server.momentum == momentum
    if said:
        method = Auto(server=ServerSettings(**said))
        with pytest.warns(UserWarning, match="method auto takes tailor"):
            run = fedtailor.train(module, data, "uniform-2", method, rounds=1, progress=False)
        assert run.method.server.momentum == (
            momentum or 0.5
        )  # an object's zero is what it is without a word


@pytest.mark.parametrize("limit", [{"macs": 10}, {"memory": "1kB"}])
def test_a_tier_that_no_piece_fits_is_never_given_one(limit):
    """One width is left then, and FedAvg would have every device train it."""
    tiers = [{"name": "s", "share": 1, **limit}, {"name": "l", "share": 1, "width": 1.0}]
    config = make_config({**SMALL, "method": {"name": "auto"}, "fleet": {"tiers": tiers}})
    with pytest.raises(FedtailorError, match="needs|fits"):
        prepare_config(config)


def test_privacy_with_auto_is_one_sentence():
    private = {"privacy": {"clip": 1.0, "noise": 1.0}, "fleet": {"name": "uniform-2"}}
    config = make_config({**SMALL, "method": {"name": "auto"}, **private})
    with pytest.raises(FedtailorError, match=r"asks for settings of \[method\] that auto does not set"):
        prepare_config(config)


def test_a_run_by_rules_that_are_no_more_is_another_run(tmp_path):
    """Else one row of a table would be made of two methods."""
    file = tmp_path / "run.toml"
    file.write_text(
        to_toml(make_config({**SMALL, "rounds": 1, "method": {"name": "auto"}})), encoding="utf-8"
    )
    (run,) = make_plan(file, "auto", 1, [], [], tmp_path / "runs").runs
    run_config(run.config, run.folder.path, on_notice=lambda _: None)
    assert is_same(run)
    setup = run.folder.path / "setup.json"
    setup.write_text(setup.read_text().replace("every size of device gets", "every size would get"))
    assert not is_same(run)


def test_unequal_rules_are_those_of_what_was_taken(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 1\nclients_per_round = 2\n[data]\ndataset = "digits"\nclients = 6\nlimit = 60\n'
        '[model]\nname = "mlp"\nhidden = [12]\n[fleet]\nname = "uniform-2"\n[engine]\nworkers = 0\n'
    )

    def told(methods: str) -> list[str]:
        plan = make_plan(file, methods, 1, [], [], tmp_path / "runs")
        for run in plan.runs:
            if not run.folder.finished:
                run_config(run.config, run.folder.path, on_notice=lambda _: None)
        return plan_rules(plan, statistics=False)

    assert told("auto,tailor") == []
    assert told("auto,fedavg") == [told("tailor,fedavg")[0].replace("tailor", "auto")]
    assert "server.momentum = 0.5 (others: 0.0)" in told("auto,fedavg")[0]


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(tmp_path):
    def stop(record: Any) -> None:
        if record.round == 2:
            raise InterruptedError

    config = make_config({**SMALL, "method": {"name": "auto"}})
    whole = run_config(config, tmp_path / "whole", on_notice=lambda _: None)
    with pytest.raises(InterruptedError):
        run_config(config, tmp_path / "parts", on_round=stop, on_notice=lambda _: None)
    assert differing(whole.state.weights, resume(tmp_path / "parts").state.weights) == set()


@pytest.mark.parametrize(("fleet", "differs"), [("equal-1/2", False), ("uniform-2", True)])
def test_a_comparison_finds_its_run_again(fleet, differs, tmp_path):
    """Momentum of zero is what averaging has anyway, and not what tailor has."""
    file = tmp_path / "run.toml"
    file.write_text(
        f'rounds = 1\nclients_per_round = 2\nevaluate_every = 1\n[data]\ndataset = "digits"\nclients = 6\nlimit = 60\n'
        f'[model]\nname = "mlp"\nhidden = [12]\n[fleet]\nname = "{fleet}"\n[engine]\nworkers = 0\n'
    )
    (run,) = make_plan(file, "auto", 1, [], [], tmp_path / "runs").runs
    run_config(run.config, run.folder.path, on_notice=lambda _: None)
    assert RunFolder(run.folder.path).finished
    assert is_same(run)
    (said,) = make_plan(
        file, "auto", 1, [], [f"name={run.config.name}", "server.momentum=0"], tmp_path / "runs"
    ).runs
    assert is_same(replace(said, folder=run.folder)) != differs
    (other,) = make_plan(file, "auto:align=4", 1, [], [f"name={run.config.name}"], tmp_path / "runs").runs
    assert not is_same(replace(other, folder=run.folder))


def test_from_python_it_warns_with_the_sentence_and_compares(tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    data = {"dataset": "digits", "clients": 4, "limit": 60}
    given = {"rounds": 1, "engine": {"workers": 0}, "progress": False}
    with pytest.warns(
        UserWarning, match="method auto takes fedavg:width=1: all devices run the same network"
    ):
        run = fedtailor.train(module, data, "equal", "auto", **given)
    assert isinstance(run.method, FedAvg)
    with pytest.warns(UserWarning, match="method auto takes tailor"):
        found = fedtailor.compare(module, data, "uniform-2", ["auto", "fedavg:width=1/2"], **given)
    assert "method auto takes tailor" in str(found)


def test_a_device_on_flower_takes_what_the_server_takes():
    """Both have the run's config, and trace the same model."""
    config = make_config({**SMALL, "method": {"name": "auto"}})
    setup = prepare_config(config)
    method, _ = taken(config.built_method, setup.model, lambda: build_fleet(config.fleet))
    assert isinstance(method, Tailor)
    assert method.for_fleet([tier.budget for tier in setup.fleet.tiers], setup.model) == setup.method
