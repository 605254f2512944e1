"""Runs of networks with exits: from a file, by depth, resumed, reported and deployed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedtailor.config import load_config
from fedtailor.deploying.bundle import deploy
from fedtailor.deploying.wanted import Wanted
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.scores import widths
from fedtailor.run.interface import run_config
from fedtailor.run.result import Run

CONFIG = """
name = "deep"
rounds = 2
clients_per_round = 4
evaluate_every = 2
[data]
dataset = "digits"
clients = 8
limit = 200
[model]
name = "vit"
patch = 4
embedding = 8
hidden = 8
depth = 4
exits = 2
[[fleet.tiers]]
name = "phone"
depth = 0.5
[[fleet.tiers]]
name = "laptop"
depth = 1
[method]
name = "depthfl"
[training]
batch_size = 16
[engine]
workers = 0
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "deep.toml").write_text(CONFIG)
    return run_config(load_config(folder / "deep.toml"), folder / "deep"), folder


def test_tiers_by_depth_are_trained_described_and_reported(finished):
    run, folder = finished
    tiers = json.loads((folder / "deep" / "setup.json").read_text())["tiers"]
    assert [(tier["name"], tier["depth"]) for tier in tiers] == [("phone", 0.5), ("laptop", 1.0)]
    assert tiers[0]["params"] < tiers[1]["params"]
    assert run.history[-1].cohort.refused == {}
    (chart,) = widths(read_runs([folder / "deep"])).charts
    assert {row["depth"] for row in chart.data} == {0.5, 1.0}
    assert "depth" in chart.views


def test_a_loaded_run_gives_the_same_piece(finished):
    run, folder = finished
    piece = run.submodel(Budget(depth=0.5)).eval()
    again = Run.load(folder / "deep").submodel(Budget(depth=0.5)).eval()
    inputs = run.data.test.take(torch.arange(3))[0]
    assert torch.equal(piece(inputs), again(inputs))
    assert not any(name.startswith(("network.blocks.2", "blocks.2")) for name in piece.state_dict())


def test_a_shallow_piece_is_deployed(finished, tmp_path):
    """Every file is run and compared with the training form before it is written."""
    run, _ = finished
    wanted = Wanted(Budget(depth=0.5), formats=("safetensors", "pt2"))
    (network,) = deploy(run, wanted, tmp_path / "bundle").networks
    assert network["width"] == "1x1/2"
    assert [file["format"] for file in network["files"]] == ["safetensors", "pt2"]
    assert all(file["difference"] <= 1e-5 for file in network["files"])


def test_a_method_that_cuts_width_alone_refuses_a_limit_on_depth(tmp_path):
    (tmp_path / "wide.toml").write_text(CONFIG.replace('"depthfl"', '"heterofl"'))
    with pytest.raises(FedtailorError, match="heterofl does not keep to a limit on depth"):
        run_config(load_config(tmp_path / "wide.toml"), tmp_path / "wide")
