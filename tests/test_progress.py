"""What ``train`` shows while it goes on: in a terminal, in a notebook, and nothing where nobody looks."""

from __future__ import annotations

from typing import Any

import pytest

import fedtailor
from fedtailor import progress
from fedtailor.progress import NotebookBars, RoundProgress, showing
from fedtailor.record import Cohort, RoundRecord, Spent
from helpers import tiny_mlp, vector_data


def train(**settings: Any) -> None:
    quick = {"rounds": 2, "evaluate_every": 1, "engine": {"workers": 0}}
    fedtailor.train(tiny_mlp(), vector_data(), "uniform-2", "fedavg", **quick, **settings)


def test_nothing_is_shown_where_nobody_looks_unless_it_is_wanted(capsys):
    train()
    assert capsys.readouterr() == ("", "")
    train(progress=True)
    shown = capsys.readouterr()
    assert "fedavg  round 2/2  tier 0.5: " in shown.err
    assert shown.err.splitlines()[:2] == ["fedavg  reading data", "fedavg  tracing Sequential"]
    assert shown.out == ""


def test_a_terminal_has_a_bar_and_none_if_it_is_not_wanted(capsys, monkeypatch):
    monkeypatch.setattr(progress.messages, "_force_terminal", True)
    seen: list[int] = []
    train(on_round=lambda record: seen.append(record.round))
    shown = capsys.readouterr().err
    assert "━" in shown
    assert "2/2" in shown
    assert seen == [1, 2]
    train(progress=False)
    assert capsys.readouterr().err == ""


def test_a_notebook_has_bars_of_its_own(monkeypatch):
    monkeypatch.setattr(progress.messages, "is_jupyter", True)
    shown = showing("fedavg <1>", 4, None)
    assert isinstance(shown, RoundProgress)
    assert isinstance(shown.bar, NotebookBars)
    tiers = {"0.5": {"loss": 1.0, "accuracy": 0.25}, "1": {"loss": 1.0, "accuracy": 0.5}}
    shown(RoundRecord(3, Cohort(2, 2), Spent(1000, 500), tiers=tiers))
    text = shown.bar.html()
    assert '<b>fedavg &lt;1&gt;</b> <progress value="3" max="4"></progress> 3/4' in text
    assert "tier 0.5: 25.0 %  tier 1: 50.0 %  1.5 kB sent" in text
    shown.remove()
    assert shown.bar.html() == ""


@pytest.mark.parametrize("wanted", [None, True])
def test_earlier_rounds_count_in_what_was_sent(wanted, capsys, monkeypatch):
    monkeypatch.setattr(progress.messages, "_force_terminal", True)
    before = [RoundRecord(1, Cohort(1, 1), Spent(1000, 1000))]
    with showing("run", 2, wanted, before) as show:
        assert show is not None
        show(RoundRecord(2, Cohort(1, 1), Spent(1000, 1000), tiers={"1": {"loss": 1.0}}))
    assert "4 kB" in capsys.readouterr().err
