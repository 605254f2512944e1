"""``fedtailor.compare``: the user's own objects through the engine of the command."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
import torch

import fedtailor
from commands import call, small_config
from fedtailor.errors import FedtailorError
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.fairness import fairness
from fedtailor.storage.run_folder import COMPARISON
from helpers import tiny_mlp, vector_data
from odd_networks import Sized

QUICK: dict[str, Any] = {"rounds": 2, "evaluate_every": 1, "engine": {"workers": 0}}


@pytest.fixture(scope="module")
def comparison() -> fedtailor.sweep.comparison.Comparison:
    methods = ["heterofl", "fedavg:width=1/2", fedtailor.FedAvg(width=0.25)]
    return fedtailor.compare(Sized, vector_data(), "uniform-2", methods, seeds=2, seed=3, **QUICK)


def test_the_result_prints_as_the_tables_of_the_command(comparison):
    text = str(comparison)
    assert text == repr(comparison)
    assert "own data, 2 rounds, 2 seeds" in text
    for method in ("heterofl", "fedavg:width=1/2", "fedavg:width=1/4"):
        assert f"\n{method} " in text
    assert "Against heterofl: accuracy, mean over tiers, same seeds" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    *_, before, last = text.split("With heterofl instead of ")
    assert before.startswith("fedavg:width=1/2:\n  0.5: ")
    assert last.startswith("fedavg:width=1/4:\n  0.5: ")
    assert last.endswith("too few to tell")
    heads = re.findall('<th style="padding:2px 8px">(.*?)</th>', comparison._repr_html_())
    assert heads == ["method", "0.5", "1", "sent"]


def test_a_data_frame_has_a_row_for_each_method_seed_and_tier(comparison):
    frame = comparison.to_pandas()
    assert len(frame) == 3 * 2 * 2
    assert set(frame["seed"]) == {3, 4}
    run = comparison.runs["heterofl"][1]
    row = frame[(frame.method == "heterofl") & (frame.seed == 4) & (frame.tier == "1")].iloc[0]
    assert row["accuracy"] == run.tiers["1"]["accuracy"]
    assert row["bytes"] == sum(record.spent.bytes for record in run.history)
    assert comparison.data()["methods"][0]["seeds"] == 2


def test_without_pandas_the_extra_is_named(comparison, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(FedtailorError, match=r"to_pandas needs pandas: pip install 'fedtailor\[pandas\]'"):
        comparison.to_pandas()


def test_seeds_share_their_start_and_methods_their_rules(comparison):
    starts = {name: [run.setup.start.state.weights for run in runs] for name, runs in comparison.runs.items()}
    first, second = starts["heterofl"]
    assert torch.equal(first["hidden.weight"], starts["fedavg:width=1/2"][0]["hidden.weight"])
    assert not torch.equal(first["hidden.weight"], second["hidden.weight"])
    heterofl, fedavg, own = (runs[0].method for runs in comparison.runs.values())
    assert heterofl.local == fedavg.local
    assert not heterofl.masked_loss
    assert own.width == 0.25


def test_the_paper_s_own_rules_are_asked_for_and_said():
    methods = {"paper": "heterofl:preset=paper", "same": {"name": "heterofl"}, "object": fedtailor.HeteroFL()}
    made = fedtailor.compare(
        tiny_mlp(), vector_data(), "equal", methods, validation=0.5, **{**QUICK, "rounds": 1}
    )
    paper, same, own = (runs[0].method for runs in made.runs.values())
    assert (paper.masked_loss, same.masked_loss, own.masked_loss) == (True, False, True)
    assert paper == own
    assert "same differs from the others in" in str(made)
    assert "Every run kept 18 training examples of its clients back" in str(made)
    assert made.data()["validation_examples"] == 18


METHODS = "heterofl,fjord,efd:global_width=each"
LESS = (  # one mlp of uniform-2's halves
    "fjord trains the widths 1/5, 2/5, 3/5, 4/5, 1 alone: tier 0.5 may have width 1/2 and gets at most 2/5; "
    'fjord:widths=["1/2",1] trains the fleet\'s own.'
)


def test_python_and_the_command_come_to_the_same_bytes(tmp_path, monkeypatch, capsys):
    words = ["--methods", METHODS, "--jobs", "1", "--runs", str(tmp_path / "runs")]
    words += ["--set", "fleet.name=uniform-2", "--set", "engine.workers=0", "--set", "model={name = 'mlp'}"]
    assert call(monkeypatch, "compare", str(small_config(tmp_path, rounds=1)), *words) == 0
    data = {"dataset": "digits", "clients": 5, "limit": 100}
    with pytest.warns(UserWarning, match="tier 0.5 may have width 1/2 and gets at most 2/5") as warned:
        made = fedtailor.compare(
            "mlp", data, "uniform-2", METHODS, folder=tmp_path / "own", seed=3,
            clients_per_round=3, **{**QUICK, "rounds": 1},
        )  # fmt: skip
    assert [each.filename for each in warned] == [__file__]
    assert list(made.results) == METHODS.split(",")
    captured = capsys.readouterr()
    assert " ".join(captured.err.split()).count(f"note: {LESS}") == 1
    assert " ".join(captured.out.split()).count(LESS) == 1
    assert "norm =" not in captured.out  # the network has no statistics
    printed = [line.rstrip() for line in captured.out.splitlines()]
    told = [line.rstrip() for line in str(made).splitlines()]
    timeless = [line for line in told[1:] if " s " not in f"{line} "]  # the first line is the title
    assert [line for line in printed[1:] if " s " not in f"{line} " and "Files:" not in line] == timeless
    there = json.loads((tmp_path / "own" / COMPARISON).read_text())["runs"]
    asked = json.loads((tmp_path / "runs" / "small" / COMPARISON).read_text())["runs"]
    for mine, theirs in zip(there, asked, strict=True):
        assert {**mine, "folder": ""} == {**theirs, "folder": ""}
        ours = tmp_path / "own" / mine["folder"] / "metrics.jsonl"
        assert (
            ours.read_bytes()
            == (tmp_path / "runs" / "small" / theirs["folder"] / "metrics.jsonl").read_bytes()
        )
    assert LESS in fairness(read_runs([tmp_path / "runs"])).text.split("\n")


def test_what_every_seed_would_warn_of_is_told_once_at_the_user_s_line():
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(UserWarning, match="may have width") as warned:
        fedtailor.compare(
            tiny_mlp(), vector_data(), "uniform-2", ["fjord"], seeds=2, **{**QUICK, "rounds": 1}
        )
    assert [(each.filename, each.lineno) for each in warned] == [(__file__, line)]


@pytest.mark.slow
def test_all_are_evaluated_after_the_same_rounds_and_keep_back_the_same_examples(tmp_path):
    settings = {"rounds": 4, "engine": {"workers": 0}, "training": {"epochs": 9}}
    methods = ["heterofl", "fedavg:width=1/4"]
    alone = [
        fedtailor.train(Sized, vector_data(), "uniform-2", each, **settings).setup.settings.evaluate_every
        for each in methods
    ]
    made = fedtailor.compare(Sized, vector_data(), "uniform-2", methods, folder=tmp_path / "runs", **settings)
    assert {runs[0].setup.settings.evaluate_every for runs in made.runs.values()} == {max(alone)}
    more = fedtailor.compare(
        Sized, vector_data(), "uniform-2", [*methods, "fedavg"], folder=tmp_path / "runs", **settings
    )
    assert {runs[0].setup.settings.evaluate_every for runs in more.runs.values()} == {max(alone)}
    chosen = fedtailor.compare(
        Sized, vector_data((20,) * 4), "equal", ["ofa-fl", "fedavg"], **{**settings, "rounds": 1}
    )
    assert [runs[0].data.sizes.tolist() for runs in chosen.runs.values()] == [[18] * 4] * 2


def test_what_is_finished_is_not_done_again(tmp_path):
    told: list[int] = []

    def again(**settings: Any) -> str:
        given = {**QUICK, "folder": tmp_path / "runs", "on_round": lambda record: told.append(record.round)}
        return str(fedtailor.compare(tiny_mlp(), vector_data(), "equal", "fedavg", **{**given, **settings}))

    first = again()
    assert told == [1, 2]
    assert again() == first
    assert told == [1, 2]
    with pytest.raises(FedtailorError, match="rounds.rounds: saved 2, now 3"):
        again(rounds=3)


@pytest.mark.slow
def test_a_comparison_writes_its_report(comparison, tmp_path):
    text = comparison.report(tmp_path / "report.md").read_text(encoding="utf-8")
    assert "fedavg:width=1/4" in text
    assert "own method" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": []}, "methods = .*: expected at least one"),
        ({"methods": ["fedavg", "fedavg"]}, "'fedavg' is there twice; expected every method once, or names"),
        ({"methods": "fedavg,fedavgg"}, "unknown method 'fedavgg'"),
        ({"methods": 5}, "method = 5: expected a name"),
        ({"methods": {"a b": "fedavg", "a/b": "heterofl"}}, "'a/b' and 'a b' would share a folder"),
        ({"methods": "fedavg:preset=papre"}, "unknown preset 'papre': did you mean 'paper'"),
        ({"seeds": 0}, "seeds = 0: expected a whole number, at least 1"),
        ({"seeds": "3"}, "seeds = '3'"),
        ({"round": 3}, "unknown setting of compare 'round': did you mean 'rounds'"),
        ({"training": {"lrr": 1}}, "did you mean 'lr'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(change, words, tmp_path):
    with pytest.raises(FedtailorError, match=words):
        fedtailor.compare(
            tiny_mlp(), vector_data(), "equal", **{"folder": tmp_path / "runs", **QUICK, **change}
        )
    assert not (tmp_path / "runs").exists()
