"""What there is: methods, models, data sets and runs, as a person lists them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from commands import call
from fedtailor.cards import LONGEST, card, summaries
from fedtailor.cli.output import console
from fedtailor.methods.registry import method_names
from synthetic_runs import write_run


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setattr(console, "width", 80)


def test_methods_are_one_line_each_and_names_are_whole(monkeypatch, capsys):
    assert call(monkeypatch, "methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(method_names())]] == method_names()
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_every_method_has_a_card_and_a_short_summary():
    assert list(summaries()) == method_names()
    assert all(0 < len(summary) <= LONGEST for summary in summaries().values())
    assert len(set(summaries().values())) == len(method_names())
    assert all("## Settings" in (card(name) or "") for name in method_names() if name != "apfl")


def test_settings_of_methods_have_their_defaults(monkeypatch, capsys):
    assert call(monkeypatch, "methods", "--json") == 0
    shown = capsys.readouterr().out
    assert "MISSING" not in shown
    settings = {row["name"]: row["settings"] for row in json.loads(shown)}
    assert settings["fedpa"]["architectures"] == "{}"
    assert settings["federated-dropout"]["keep"] == "0.5"


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path):
    """``--help`` and lists answer at once: the heavy imports happen only where a command needs them."""
    code = (
        "import sys\nfrom fedtailor.cli.main import main\n"
        "for words in (['--help'], ['methods'], ['methods', 'heterofl'], ['runs', '.']):\n"
        "    sys.argv = ['fedtailor', *words]\n"
        "    try:\n        main()\n    except SystemExit as stop:\n        assert not stop.code, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    assert "No run in ./" in shown.stdout


def test_datasets_say_what_is_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path))
    monkeypatch.setattr(console, "width", 200)
    assert call(monkeypatch, "datasets") == 0
    lines = capsys.readouterr().out.splitlines()
    (digits,) = [line for line in lines if "│ digits " in line]
    assert "embedded" in digits
    (cinic,) = [line for line in lines if "│ cinic10 " in line]
    assert "not here" in cinic or "found" in cinic


def test_models_cost_what_profile_says(monkeypatch, capsys):
    assert call(monkeypatch, "models", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["cnn"]["params"], rows["cnn"]["input"]) == (1_556_874, "1x28x28")
    assert rows["char-lstm"]["input"] == "80"
    assert call(monkeypatch, "profile", "femnist-cnn", "--fleet", "equal", "--json") == 0
    (profiled,) = json.loads(capsys.readouterr().out)
    costs = ("params", "macs")
    assert [profiled[cost] for cost in costs] == [rows["femnist-cnn"][cost] for cost in costs]


def test_models_for_given_examples_and_for_none(monkeypatch, capsys):
    assert call(monkeypatch, "models", "--input", "80") == 0
    shown = capsys.readouterr().out
    (line,) = [line.split() for line in shown.splitlines() if line.startswith("char-lstm ")]
    assert line[:5] == ["char-lstm", "80", "204,122", "16.2", "M"]
    assert "lenet5" not in shown
    assert call(monkeypatch, "models", "--input", "0") == 2
    assert "no network takes such examples" in capsys.readouterr().err


def test_runs_are_listed_with_state_best_and_size(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/done", "fjord", 0.9, 1, rounds=3)
    write_run(tmp_path / "runs/pair/begun", "heterofl", 0.8, 1, rounds=2, finished=False)
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/metrics.jsonl").write_text("{broken\n")
    assert call(monkeypatch, "runs", "--json") == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"done": "finished", "pair/begun": "interrupted", "torn": "damaged"}
    assert rows["done"]["bytes"] == sum(
        file.stat().st_size for file in (tmp_path / "runs/done").rglob("*") if file.is_file()
    )
    assert rows["done"]["best"]["metric"] == "accuracy"
    assert rows["torn"]["best"] is None
    assert call(monkeypatch, "runs") == 0
    shown = capsys.readouterr().out
    assert f"{100 * rows['done']['best']['value']:.1f} %" in shown
    assert "3/3" in shown


def test_no_runs_and_no_folder_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "runs") == 2
    assert "no such folder" in capsys.readouterr().err
    assert call(monkeypatch, "watch", "runs/first") == 2
    assert "runs/first: no such folder" in capsys.readouterr().err
    assert call(monkeypatch, "runs", ".") == 0
    assert "No run in ./" in capsys.readouterr().out
