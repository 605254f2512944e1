"""What the terminal shows of a run that goes on."""

from __future__ import annotations

import io

from rich.console import Console

from commands import call, small_config
from fedtailor.cli.output import RoundProgress
from fedtailor.record import Cohort, RoundRecord, Spent, Tiers
from fedtailor.steps import TRAINING, step


def record(number: int, sent: int, tiers: Tiers | None = None) -> RoundRecord:
    measuring = Spent(bytes_down=sent // 2)
    return RoundRecord(number, Cohort(2, 2), Spent(sent, sent // 2), measuring, tiers=tiers)


def test_bytes_of_earlier_rounds_count_and_rounds_that_are_done_again_count_once(capsys):
    tiers = {"all": {"accuracy": 0.5, "loss": 1.0}}
    progress = RoundProgress("run", 4, earlier=[record(1, 1000), record(2, 2000), record(3, 4000)])
    progress(record(3, 4000))
    progress(record(4, 500, tiers))
    shown = capsys.readouterr()
    assert "round 4/4" in shown.err
    assert "15 kB" in shown.err


def test_steps_are_lines_until_training_begins_where_there_is_no_terminal(capsys):
    with RoundProgress("run", 2) as progress:
        for text in ("reading data: digits", "tracing cnn", TRAINING, "evaluating 5 tiers"):
            step(text)
        progress(record(1, 1000))
    step("not shown")
    assert capsys.readouterr().err.splitlines() == ["run  reading data: digits", "run  tracing cnn"]


def test_steps_stand_beside_the_bar_and_go_when_they_are_over(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("fedtailor.progress.messages", screen)
    with RoundProgress("run", 2) as progress:
        assert progress.bar is not None
        states = []
        for text in ("tracing cnn", TRAINING, "evaluating 5 tiers"):
            step(text)
            states.append(progress.bar.tasks[0].fields["state"])
        progress(record(1, 1000, {"all": {"accuracy": 0.5, "loss": 1.0}}))
        states.append(progress.bar.tasks[0].fields["state"])
        step("evaluating 5 tiers")
        states.append(progress.bar.tasks[0].fields["state"])
    assert states[:3] == ["tracing cnn", "", "evaluating 5 tiers"]
    assert states[3] == "tier all: 50.0 %  2 kB sent"
    assert states[4] == "evaluating 5 tiers  tier all: 50.0 %"


def test_a_run_says_what_it_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small_config(tmp_path, rounds=1)
    assert call(monkeypatch, "run", "small.toml", "--set", "method.name=heterofl") == 0
    shown = capsys.readouterr().err.splitlines()
    steps = ["reading data: digits", "tracing cnn", "checking what each tier is given"]
    assert [f"small (heterofl)  {text}" for text in steps] == shown[:3]
    assert not [line for line in shown if "training" in line]
