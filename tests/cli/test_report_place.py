"""Where a report goes: refused before any work is done, and never over another one by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import call, small_config
from synthetic_runs import write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/done", "fjord", 0.9, 1, rounds=3)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "x.pdf"], ["'x.pdf'", ".html, .md, .csv or .png", "a browser prints"]),
        (["-o", "x.docx"], ["'x.docx'", ".html, .md, .csv or .png"]),
        (["-o", "x.pdf", "--format", "html"], ["'x.pdf'", "ends in .html"]),
        (["-o", "x.md", "--format", "html"], ["'x.md'", "ends in .html"]),
        (["-o", "taken/x.md"], ["taken/x.md cannot be written"]),
        (["-o", "/proc/x.md"], ["/proc/x.md cannot be written"]),
        (["-o", "runs", "--format", "md"], ["runs cannot be written", "it is a folder"]),
        (["-o", "taken", "--format", "csv"], ["taken cannot be written", "it is a file"]),
        (["-o", "runs", "--format", "csv"], ["runs exists already", "--overwrite"]),
    ],
)
def test_what_cannot_be_written_is_refused(folder, monkeypatch, capsys, words, said):
    (folder / "taken").write_text("a file")
    before = sorted(folder.rglob("*"))
    assert call(monkeypatch, "report", "runs", *words) == 2
    shown = capsys.readouterr().err
    for word in said:
        assert word in shown
    assert sorted(folder.rglob("*")) == before


def test_a_report_is_replaced_only_when_asked(folder, monkeypatch, capsys):
    place = folder / "deep/er/report.md"
    assert call(monkeypatch, "report", "runs", "-o", str(place)) == 0
    place.write_text("mine now")
    capsys.readouterr()
    assert call(monkeypatch, "report", "runs", "-o", str(place)) == 2
    assert "exists already" in capsys.readouterr().err
    assert place.read_text() == "mine now"
    assert call(monkeypatch, "report", "runs", "-o", str(place), "--overwrite") == 0
    assert place.read_text().startswith("# runs")


@pytest.mark.parametrize(
    ("place", "said"),
    [("taken/report.html", "cannot be written"), ("taken", "exists already"), ("x.pdf", "'x.pdf'")],
)
def test_compare_finds_a_bad_place_before_it_runs(folder, monkeypatch, capsys, place, said):
    small_config(folder)
    (folder / "taken").write_text("a file")
    assert call(monkeypatch, "compare", "small.toml", "--methods", "fedavg", "--report", place) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "runs/small").exists()


def test_compare_writes_the_kind_of_report_that_its_name_says(folder, monkeypatch, capsys):
    small_config(folder, rounds=1)
    words = ("compare", "small.toml", "--methods", "fedavg", "--jobs", "1", "--report", "answer.md")
    assert call(monkeypatch, *words) == 0
    assert (folder / "answer.md").read_text().startswith("# small")
