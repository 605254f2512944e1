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
from fedtailor.report.folders import read_runs
from fedtailor.storage.run_folder import SETTINGS
from synthetic_runs import write_run


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setattr(console, "width", 80)


def test_methods_are_one_line_each_and_names_are_whole(monkeypatch, capsys):
    assert call(monkeypatch, "methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["name", "what", "it", "does"]
    names = sorted([*method_names(), "auto"])  # which stands for one of the others
    assert [line.split()[0] for line in lines[3 : 3 + len(names)]] == names
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_every_method_has_a_card_and_a_short_summary():
    assert list(summaries()) == sorted([*method_names(), "auto"])
    assert all(0 < len(summary) <= LONGEST for summary in summaries().values())
    assert len(set(summaries().values())) == len(method_names()) + 1
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
    assert call(monkeypatch, "datasets") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (digits,) = [place for place, line in enumerate(lines) if line.startswith("digits ")]
    assert lines[digits + 1].strip() == "embedded"
    (cinic,) = [place for place, line in enumerate(lines) if line.startswith("cinic10 ")]
    assert lines[cinic + 2].strip().startswith(("not here", "found"))


def test_a_path_of_usual_length_is_not_broken(monkeypatch, capsys):
    place = "/home/somebody/data/mnist/train-images-idx3-ubyte.gz"
    monkeypatch.setattr("fedtailor.data.datasets.summary_and_state", lambda name: (name, f"found: {place}"))
    assert call(monkeypatch, "datasets") == 0
    assert f" found: {place}" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_all_lists_have_one_style_and_nothing_is_cut(width, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console, "width", width)
    monkeypatch.chdir(tmp_path)  # the title names the folder, and the whole path need not fit
    write_run(tmp_path / "runs/done", "fjord", 0.9, 1, rounds=1)
    commands = {"methods": (), "models": ("--input", "80"), "datasets": (), "runs": ("runs",)}
    for command, words in commands.items():
        assert call(monkeypatch, command, *words) == 0
        text = capsys.readouterr().out
        title, heads, rule, *_ = text.splitlines()
        assert title.strip(), command
        assert heads.strip(), command
        assert set(rule.strip()) == {"─"}, command
        assert not set(text) & set("…│┃┏╇"), command
        assert max(map(len, text.splitlines())) <= width
        assert command != "models" or "learned positions" in " ".join(text.split())  # the whole description


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


def test_runs_of_python_have_their_method_and_rounds(tmp_path, monkeypatch, capsys):
    settings = {"rounds": 8, "method": {"name": "fjord"}}
    place = write_run(tmp_path / "runs/mine", "fjord", 0.9, 1, rounds=8)
    (place / "config.toml").unlink()
    setup = json.loads((place / "setup.json").read_text())
    (place / "setup.json").write_text(json.dumps({**setup, SETTINGS: settings}))
    assert call(monkeypatch, "runs", str(tmp_path / "runs")) == 0
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mine ")]
    assert line[:4] == ["mine", "fjord", "finished", "8/8"]


def test_a_method_from_a_file_leaves_room_and_a_shorter_plan_is_not_exceeded(tmp_path, monkeypatch, capsys):
    name = "/home/somebody/projects/federated/methods/shy.py:Shy"
    place = write_run(tmp_path / "runs/a-run-of-some-length", name, 0.9, 1, rounds=42)
    config = (place / "config.toml").read_text()
    (place / "config.toml").write_text(config.replace("rounds = 42", "rounds = 40"))
    assert call(monkeypatch, "runs", str(tmp_path / "runs")) == 0
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if "some-length" in line]
    assert line[:4] == ["a-run-of-some-length", "shy.py:Shy", "finished", "42"]
    (run,) = read_runs([place])
    assert run.variant == "shy.py:Shy"


def test_a_long_metric_hides_no_column(tmp_path, monkeypatch, capsys):
    place = write_run(tmp_path / "runs/fedavg-of-a-longer-name/houses", "fjord", 0.9, 1, rounds=1)
    text = (place / "metrics.jsonl").read_text().replace('"accuracy"', '"mean absolute error"')
    (place / "metrics.jsonl").write_text(text)
    assert call(monkeypatch, "runs", str(tmp_path / "runs")) == 0
    shown = capsys.readouterr().out
    assert " kB" in shown
    assert "absolute" in shown
    assert "0.0" in shown


def test_a_method_without_a_card_shows_its_settings(tmp_path, monkeypatch, capsys):
    (tmp_path / "shy.py").write_text(
        "from dataclasses import dataclass\nfrom fedtailor.method import Method\n\n"
        "@dataclass(frozen=True)\nclass Shy(Method):\n"
        '    """Half of each budget."""\n\n    share: float = 0.5\n    loud: bool = False\n'
    )
    assert call(monkeypatch, "methods", f"{tmp_path}/shy.py:Shy") == 0
    text = capsys.readouterr().out
    assert "Half of each budget." in text
    rows = [line.split() for line in text.splitlines()]
    assert ["share", "float", "0.5"] in rows
    assert ["loud", "bool", "false"] in rows
    align = ["align", "int", "or", '"auto"', "1"]
    assert align in rows
    assert rows.index(["share", "float", "0.5"]) < rows.index(align)


def test_no_runs_and_no_folder_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "runs") == 2
    assert "no such folder" in capsys.readouterr().err
    assert call(monkeypatch, "watch", "runs/first") == 2
    assert "runs/first: no such folder" in capsys.readouterr().err
    assert call(monkeypatch, "runs", ".") == 0
    assert "No run in ./" in capsys.readouterr().out
