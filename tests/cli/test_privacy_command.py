"""``fedtailor privacy``: the plan of a private run, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli.main import app
from fedtailor.errors import FedtailorError

CONFIG = """
rounds = 50
clients_per_round = 6
[data]
dataset = "digits"
clients = 6
partition = "iid"
[model]
name = "mlp"
hidden = [8]
[fleet]
name = "uniform-2"
[privacy]
clip = 1.0
noise = 10.0
sampling = "known"
epsilon = 1.0
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "private.toml"
    file.write_text(CONFIG)
    return file


def test_a_plan_for_people_fits_80_columns_and_says_what_would_be_refused(config):
    shown = CliRunner().invoke(app, ["privacy", str(config)], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    text = " ".join(shown.output.split())
    assert "multiplier epsilon" in text
    assert "The run would be refused: it costs 3.19" in text


def test_a_plan_for_programs(config):
    shown = CliRunner().invoke(
        app, ["privacy", str(config), "--json", "--epsilon", "2", "--set", "privacy.epsilon=0"]
    )
    plan = json.loads(shown.stdout)
    assert [tier["multiplier"] for tier in plan["tiers"]] == [10, 10]
    # Six clients are expected to hold the small tier's part, three of them the rest.
    assert [tier["per_weight"] for tier in plan["tiers"]] == [pytest.approx(10 / 6), pytest.approx(10 / 3)]
    (need,) = plan["needs"]
    assert need["noise"] > 10
    assert need["rounds"] < 50


def test_without_a_clip_there_is_no_plan(config):
    config.write_text(CONFIG.partition("[privacy]")[0])
    with pytest.raises(FedtailorError, match=r"privacy\.clip = 0\.0: expected a number above 0"):
        CliRunner().invoke(app, ["privacy", str(config)], catch_exceptions=False)
