"""Every paper's script: what it lists, and what it reads off a finished run."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.run.interface import run_config

ROOT = Path(__file__).parents[1]
PAPERS = sorted(script.parent.name for script in ROOT.glob("reproduce/*/run.py"))
SMALL = (
    "rounds=3", "clients_per_round=2", "evaluate_every=1", "engine.workers=0", "training={batch_size = 8}",
    "data.dataset=digits", "data.clients=5", "data.limit=100", "data.partition=iid", "data.min_examples=2",
    "data.options={}", 'model={name = "cnn", channels = [8, 8]}',
)  # fmt: skip
STAGES = ("rounds=5", "clients_per_round=5", "method.warmup=1", "method.align=1", "method.search_at_once=0")


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a paper's script; what it counts in hundreds of rounds and images fits small runs."""
    monkeypatch.syspath_prepend(ROOT)
    module = importlib.import_module(f"reproduce.{request.param}.run")
    for name, value in {"COMMON": 50, "SETTLED": 1}.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize("paper", PAPERS)
def test_a_script_lists_its_commands(paper, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["run", "--list"])
    runpy.run_path(str(ROOT / "reproduce" / paper / "run.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(
        line.startswith(("fedtailor compare ", "fedtailor run ", "fedtailor attack ")) for line in lines
    )


def figures(script: Any, folder: Path, experiment: str, method: str, *settings: str) -> dict[str, Any]:
    """What is read off one small run of an experiment."""
    (chosen,) = (each for each in script.EXPERIMENTS if each.name == experiment)
    methods = {method: chosen.methods[method]} if isinstance(chosen.methods, dict) else (method,)
    small = replace(chosen, methods=methods, seeds=1, settings=(*chosen.settings, *SMALL, *settings))
    (run,) = small.plan(folder)
    run_config(run.config, run.folder.path)
    found: dict[str, Any] = {}
    for read in small.figures:
        found |= read(run.folder)
    assert json.loads(json.dumps(found)) == found  # as the file of results will hold it
    return found


@pytest.mark.parametrize("script", ["channels", "fjord"], indirect=True)
def test_accuracy_and_costs(script, tmp_path):
    found = figures(script, tmp_path, "fashion-iid", "fedavg:width=1/5")
    assert list(found["accuracy"]) == ["0.2", "0.4", "0.6", "0.8", "1"]
    assert found["rounds"] == 3
    assert min(found["bytes"], found["macs"]) > 0


@pytest.mark.parametrize("script", ["fjord", "flanc"], indirect=True)
def test_perplexity(script, tmp_path):
    method = script.__name__.split(".")[1]
    assert list(figures(script, tmp_path, "shakespeare", method)["perplexity"]) == ["1", "2", "3"]


@pytest.mark.parametrize("script", ["adapters"], indirect=True)
def test_traffic_by_rank(script, tmp_path):
    found = figures(script, tmp_path, "shakespeare", "fedavg:width=1/4", "objective.task=auto")
    assert set(found["traffic"]) <= {"rank 2", "rank 4", "rank 8"}
    assert len({tuple(each) for each in found["traffic"].values()}) == 1  # one network for all


@pytest.mark.parametrize("script", ["flanc"], indirect=True)
def test_how_orthogonal_bases_are(script, tmp_path):
    found = figures(script, tmp_path, "fashion-static-iid", "flanc")
    assert all(each["largest_cosine"] <= 1 for each in found["bases"].values())
    assert found["bases"]


@pytest.mark.parametrize("script", ["flado"], indirect=True)
def test_what_targets_cost_and_how_steps_are_aligned(script, tmp_path):
    found = figures(script, tmp_path, "tenth", "flado")
    assert found["best"]["flops"] > 0
    assert found["course"][-1] == found["accuracy"][max(found["accuracy"])]
    assert found["alignment"]["mean_smallest_p"] <= found["alignment"]["mean_largest_p"]


@pytest.mark.parametrize("script", ["ofa_fl"], indirect=True)
def test_moments_of_pruning(script, tmp_path):
    found = figures(script, tmp_path, "cifar10", "ofa-fl", "method.first=1", "method.every=1")
    assert found["events"] == [2, 3]
    assert found["final"]["round"] == 3
    assert [point["supported"] for point in found["series"]] == [1, 2, 3]


@pytest.mark.parametrize("script", ["apfl"], indirect=True)
@pytest.mark.parametrize(("method", "settings"), [("apfl", STAGES), ("fedavg-half", ("method.align=1",))])
def test_networks_of_clients(script, tmp_path, method, settings):
    found = figures(script, tmp_path, "iid-high", method, *settings)
    assert found["accuracy"].keys() >= {"loc, own images", "glo, common images"}
    assert sum(tier["clients"] for tier in found["tiers"].values()) == 5
    assert (found["bytes_before_training"] > 0) == ("accuracy_in_search" in found) == (method == "apfl")


def _run(**accuracy: float) -> dict[str, Any]:
    tiers = {tier.removeprefix("t").replace("_", "."): value for tier, value in accuracy.items()}
    return {"accuracy": tiers, "bytes": 2_000_000, "macs": 3_000_000_000}


def test_tables_join_the_runs_of_one_tier_each_and_star_what_is_more_than_noise(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from reproduce.shared.tables import accuracy_table, difference_table, rows_of

    runs = {
        "fjord": {
            "1": _run(t0_5=80.0, t1=90.0),
            "2": _run(t0_5=81.0, t1=91.0),
            "3": _run(t0_5=80.5, t1=90.4),
        },
        # Each network is given to every tier; a row has of each tier its own.
        "efd:w=0.5": {seed: _run(t0_5=70.0 + int(seed), t1=70.0 + int(seed)) for seed in "123"},
        "efd:w=1": {seed: _run(t0_5=60.0, t1=89.9 + int(seed) % 2) for seed in "123"},
        "efd": {seed: _run(t0_5=60.0, t1=60.0) for seed in "123"},
        "kept otherwise": {"1": {"loss": 1.0}},
    }
    rows = rows_of(runs, ["fjord", "efd:w=each", "efd", "kept otherwise", "not run"])
    assert list(rows) == ["fjord", "efd:w=each", "efd"]
    assert rows["efd:w=each"]["2"] == {
        "accuracy": {"0.5": 72.0, "1": 89.9},
        "bytes": 4_000_000,
        "macs": 6_000_000_000,
    }
    lines = list(accuracy_table(rows))
    assert lines[2] == "| `fjord` | 80.5 ± 0.5 | 90.5 ± 0.5 | 2 | 3 | 3 | 0 |"
    assert lines[4] == "| `efd` | 60.0 ± 0.0 (all) |  | 2 | 3 | 3 | 0 |"  # one network for all: shown once
    table = list(difference_table(rows, "fjord"))
    assert (
        table[2] == "| `efd:w=each` | -8.5 ± 2.2* | +0.1 ± 2.6 |"
    )  # t = 4.303 times 0.866 and 1.058, over sqrt(3)
    assert "corrected for 4 comparisons" in table[-1]
