"""Runs with different tiers or methods in one report: side by side, and no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import synthetic_runs
from fedtailor.report.export import write_report
from fedtailor.report.folders import read_runs
from fedtailor.report.live import look
from fedtailor.report.page import chart_data
from fedtailor.storage.rows import as_text
from fedtailor.storage.run_folder import RunFolder
from synthetic_runs import write_run


@pytest.fixture
def unlike(tmp_path, monkeypatch) -> list[Path]:
    """Two runs of five tiers, one of two, one of two others, one without an evaluation, and one that says little."""
    runs = [write_run(tmp_path / f"five-{seed}", "fjord", 0.9, seed, 4) for seed in (1, 2)]
    for name, method, tiers in (
        ("two", "heterofl", {"small": 0.5, "large": 1.0}),
        ("others", "fedavg", {"board": 0.25, "phone": 1.0}),
    ):
        monkeypatch.setattr(synthetic_runs, "TIERS", tiers)
        runs.append(write_run(tmp_path / name, method, 0.9, 1, 4))
    bare = write_run(tmp_path / "bare", "uniprob", 0.9, 1, 4)
    for name in ("setup.json", "config.toml", "environment.json", "coverage.jsonl"):
        (bare / name).unlink()
    rows = [json.loads(line) for line in (bare / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        for key in ("by_tier", "deployed", "method", "measuring"):
            row.pop(key, None)
    (bare / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    early = write_run(tmp_path / "early", "fjord", 0.9, 3, 1, finished=False)
    row = json.loads((early / "metrics.jsonl").read_text(encoding="utf-8"))
    (early / "metrics.jsonl").write_text(json.dumps({**row, "tiers": None}) + "\n", encoding="utf-8")
    return [*runs, bare, early]


@pytest.mark.parametrize("form", ["md", "csv", pytest.param("html", marks=pytest.mark.slow)])
def test_runs_of_different_tiers_stand_side_by_side(form, unlike, tmp_path):
    place = tmp_path / ("out" if form == "csv" else f"out.{form}")
    write_report(unlike, place, None, form)
    assert place.exists()
    if form == "md":
        text = place.read_text(encoding="utf-8")
        assert all(f"tier {name}" in text for name in ("0.2", "small", "board"))


def test_watch_shows_them_too(unlike, tmp_path):
    state, panels = look(tmp_path)
    assert "fjord" in state
    assert panels


def test_runs_of_the_same_tiers_have_no_name_for_them(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"five-{seed}", "fjord", 0.9, seed, 3)
    assert {run.setting for run in read_runs([tmp_path])} == {""}


def test_scores_that_are_no_numbers_are_said_and_blank_no_page(tmp_path):
    folder = write_run(tmp_path / "blown", "fjord", 0.9, 1, 3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for scores in rows[-1]["tiers"].values():
        scores["loss"] = None  # as NaN is written
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_report([folder], tmp_path / "out.md", None, "md")
    text = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "1 of 3 evaluations, the first after round 3, hold scores that are no numbers" in text
    _state, panels = look(tmp_path)
    assert "NaN" not in as_text(chart_data(panels))


def test_a_run_that_is_writing_its_first_row_has_none_yet(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "cli', encoding="utf-8")
    assert RunFolder(tmp_path).records() == []
