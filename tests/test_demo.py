"""The demo: one command wherever it is named, and what it claims."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import call
from fedtailor.sweep.plan import make_plan

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"fedtailor compare configs/demo.toml .*")


def words(file: str) -> list[str]:
    """The demo's command as a file has it, without where its report goes."""
    found = COMMAND.search((ROOT / file).read_text(encoding="utf-8"))
    assert found, file
    told = shlex.split(found[0], comments=True)
    return told[: told.index("--report")] if "--report" in told else told


def test_one_command_everywhere():
    told = words("Makefile")
    for file in ("configs/demo.toml", "docs/demo.md", "docs/reading-a-report.md"):
        assert words(file) == told, file


def test_plan_and_first_page_are_of_that_command(tmp_path):
    told = words("Makefile")
    chosen, seeds = told[told.index("--methods") + 1], int(told[told.index("--seeds") + 1])
    plan = make_plan(ROOT / "configs" / "demo.toml", chosen, seeds, [], [], tmp_path)
    first, *others = plan.variants
    assert len(plan.runs) == 9
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for other in others:
        assert f"With {first} instead of {other}:" in readme


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 7])
def test_larger_devices_gain_more_than_the_spread_of_the_seeds(seed, tmp_path, monkeypatch, capsys):
    """Of the five base seeds in docs/demo.md two; what a device gains is a paired difference."""
    monkeypatch.chdir(ROOT)
    more = ["--set", f"seed={seed}", "--runs", str(tmp_path), "--json"]
    assert call(monkeypatch, *words("Makefile")[1:], *more) == 0
    found = json.loads(capsys.readouterr().out)["differences"][
        "methods"
    ]  # against tailor: losses are negative
    larger = {"fedavg:width=1/8": ("phone", "laptop"), "fedavg:only_able=true": ("laptop",)}
    for method, tiers in larger.items():
        for tier in tiers:
            difference = found[method]["tiers"][tier]
            assert -difference["mean"] > difference["deviation"], (method, tier)
    assert found["fedavg:width=1/8"]["tiers"]["board"]["mean"] < 0  # also the board gains
