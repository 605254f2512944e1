"""Runs of a comparison are evaluated after the same rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commands import small_config
from fedtailor.config import to_toml
from fedtailor.sweep.evaluations import evaluated_alike
from fedtailor.sweep.plan import Plan, is_same, make_plan


def planned(
    folder: Path, methods: str, *overrides: str, grid: tuple[str, ...] = ()
) -> tuple[Plan, list[str]]:
    notices: list[str] = []
    file = small_config(folder, rounds=200)
    file.write_text(file.read_text().replace("evaluate_every = 1\n", ""))
    plan = make_plan(file, methods, 2, grid, overrides, folder / "runs")
    assert {run.config.evaluate_every for run in plan.runs} <= {"auto", 7}
    return evaluated_alike(plan, notices.append), notices


def intervals(plan: Plan) -> set[int | str]:
    return {run.config.evaluate_every for run in plan.runs}


def test_the_most_expensive_method_decides_for_all(tmp_path):
    alone, notices = planned(tmp_path, "fedavg")
    (every,) = intervals(alone)
    assert notices == [f"all runs are evaluated after every {every} rounds and at the end"]
    both, _ = planned(tmp_path, "fedavg,heterofl")  # which measures norms on all clients
    (slower,) = intervals(both)
    assert slower > every
    assert len(both.runs) == 4


def test_one_evaluation_is_called_one(tmp_path):
    plan, notices = planned(tmp_path, "heterofl", "rounds=4", "data.limit=1000")
    (every,) = intervals(plan)
    assert every == 4
    assert notices == ["all runs are evaluated once, after the last round"]


def test_a_run_that_is_there_decides_for_those_that_come_later(tmp_path):
    plan, _ = planned(tmp_path, "fedavg")
    first = plan.runs[0]
    first.folder.path.mkdir(parents=True)
    (first.folder.path / "config.toml").write_text(to_toml(replace(first.config, evaluate_every=13)))
    again, _ = planned(tmp_path, "fedavg,heterofl")
    assert intervals(again) == {13}
    assert is_same(again.runs[0])
    assert is_same(replace(first, config=replace(first.config, evaluate_every="auto")))
    assert not is_same(replace(first, config=replace(first.config, evaluate_every=14)))


def test_what_the_config_says_stays_and_nothing_is_said(tmp_path):
    plan, notices = planned(tmp_path, "fedavg,heterofl", "evaluate_every=7")
    assert intervals(plan) == {7}
    assert notices == []
