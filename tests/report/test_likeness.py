"""Which runs of a report are seeds of one thing, and how those that are not are told apart."""

from __future__ import annotations

import json
from pathlib import Path

from fedtailor import train
from fedtailor.methods.tailor.tailor import Tailor
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from helpers import tiny_mlp, vector_data
from synthetic_runs import write_records, write_run


def changed(place: Path, **settings: str) -> Path:
    """The run with other settings in its config: top-level keys, ``data_alpha`` for those of a table."""
    lines = (place / "config.toml").read_text().splitlines()
    for key, value in settings.items():
        name = key.rpartition("_")[2]
        lines = [f"{name} = {value}" if line.startswith(f"{name} = ") else line for line in lines]
    (place / "config.toml").write_text("\n".join(lines) + "\n")
    return place


def answer_of(folder: Path):
    return next(each for each in all_panels(read_runs([folder])) if each.key == "answer")


def test_runs_of_other_rounds_are_never_pooled(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"long-{seed}", "fjord", 0.9, seed, rounds=60)
        write_run(tmp_path / f"short-{seed}", "fjord", 0.9, seed, rounds=1)
    found = answer_of(tmp_path)
    rows = found.tables[0][1]
    assert [(row["method"], row["seeds"]) for row in rows] == [("fjord rounds=60", 2), ("fjord rounds=1", 2)]
    assert "These runs differ in more than their methods: rounds." in found.text


def test_what_a_method_brings_along_for_the_server_is_no_difference_beyond_it(tmp_path):
    own = Tailor().server.momentum
    assert own
    for name, method, momentum in (("a", "fjord", 0.0), ("b", "tailor", own), ("c", "heterofl", 0.0)):
        place = write_run(tmp_path / name, method, 0.9, 1, 3)
        with (place / "config.toml").open("a") as file:
            file.write(f"\n[server]\nmomentum = {momentum}\n")
    assert "differ in more than their methods" not in answer_of(tmp_path).text
    other = (tmp_path / "c" / "config.toml").read_text().replace("momentum = 0.0\n", "momentum = 0.9\n")
    (tmp_path / "c" / "config.toml").write_text(other)
    assert "These runs differ in more than their methods: momentum." in answer_of(tmp_path).text


def test_other_networks_under_equal_settings_are_told_apart(tmp_path):
    """As where a model is the user's own file: its config says nothing of what is in it."""
    first, second = (write_run(tmp_path / name, "fjord", 0.9, 1, 3) for name in "ab")
    setup = json.loads((second / "setup.json").read_text())
    setup["layers"]["conv1.weight"][0]["length"] = 80
    setup["tiers"][-1]["params"] = 250_000
    (second / "setup.json").write_text(json.dumps(setup))
    assert [run.variant for run in read_runs([first, second])] == [
        "fjord 100 k parameters",
        "fjord 250 k parameters",
    ]


def test_labels_are_short_and_what_else_differs_is_in_a_table(tmp_path):
    for name, alpha, rounds in (("a", "0.1", 3), ("b", "5", 3), ("c", "5", 4)):
        changed(write_run(tmp_path / name, "fjord", 0.9, 1, rounds), data_alpha=alpha, clients=alpha)
    runs = read_runs([tmp_path])
    assert [run.variant for run in runs] == [
        "fjord rounds=3 alpha=0.1",
        "fjord rounds=3 alpha=5",
        "fjord rounds=4 alpha=5",
    ]
    tables = dict(next(each.tables for each in all_panels(runs) if each.key == "provenance"))
    rows = {row["setting"]: row for row in tables["Settings in which runs differ"]}
    assert rows["data.alpha"]["fjord rounds=4 alpha=5"] == "5"


def test_a_seed_counts_once(tmp_path):
    for name in ("first", "again"):
        write_run(tmp_path / name, "fjord", 0.9, seed=1, rounds=5)
    write_run(tmp_path / "other", "fjord", 0.9, seed=2, rounds=5)
    found = answer_of(tmp_path)
    assert [row["seeds"] for row in found.tables[0][1]] == [2]
    assert (
        f"left out ({tmp_path / 'first'})" in found.text or f"left out ({tmp_path / 'again'})" in found.text
    )
    states = [row["state"] for row in all_panels(read_runs([tmp_path]))[-1].tables[0][1]]
    assert sorted(states) == ["finished", "finished", "left out: same seed"]


def test_the_run_that_came_furthest_stands_for_its_seed(tmp_path):
    write_run(tmp_path / "broken", "fjord", 0.9, seed=1, rounds=9, finished=False)
    changed(write_run(tmp_path / "whole", "fjord", 0.9, seed=1, rounds=5), rounds="9")
    (run,) = read_runs([tmp_path])
    assert (run.folder, run.repeats) == (str(tmp_path / "whole"), (str(tmp_path / "broken"),))


def test_how_often_is_evaluated_tells_runs_apart_only_where_it_may_stop_them(tmp_path):
    for seed in (1, 2):
        place = write_run(tmp_path / f"{seed}", "fjord", 0.9, seed, rounds=5)
        text = (place / "config.toml").read_text()
        (place / "config.toml").write_text(f"evaluate_every = {seed}\n{text}[stopping]\npatience = 0\n")
    assert {run.variant for run in read_runs([tmp_path])} == {"fjord"}
    for file in tmp_path.rglob("config.toml"):
        file.write_text(file.read_text().replace("patience = 0", "patience = 3"))
    assert {run.variant for run in read_runs([tmp_path])} == {
        "fjord evaluate_every=1",
        "fjord evaluate_every=2",
    }


def test_a_folder_that_is_given_twice_is_one(tmp_path):
    write_run(tmp_path / "runs/one", "fjord", 0.9, 1, 3)
    (run,) = read_runs([tmp_path / "runs", tmp_path / "runs/one", tmp_path / "runs/../runs"])
    assert run.repeats == ()


def test_an_unfinished_seed_is_not_averaged_with_finished_ones(tmp_path):
    write_run(tmp_path / "one", "fjord", 0.9, seed=1, rounds=60)
    broken = write_run(tmp_path / "two", "fjord", 0.9, seed=2, rounds=60, finished=False)
    (run,) = read_runs([broken])
    write_records(broken, run.records[:1])
    found = answer_of(tmp_path)
    (row,) = found.tables[0][1]
    assert (row["seeds"], "±" in row["mean"]) == (1, False)
    assert "1 of 2 runs are not finished: 1 are left out of final figures" in found.text


def test_scores_on_other_data_or_of_other_metrics_are_never_ranked_together(tmp_path):
    write_run(tmp_path / "a", "fjord", 0.9, 1, 3)
    other = write_run(tmp_path / "b", "heterofl", 0.9, 1, 3)
    setup = json.loads((other / "setup.json").read_text())
    setup["data"]["dataset"] = "words"
    (other / "setup.json").write_text(json.dumps(setup))
    odd = write_run(tmp_path / "c", "fedavg", 0.9, 1, 3)
    (odd / "metrics.jsonl").write_text((odd / "metrics.jsonl").read_text().replace("accuracy", "perplexity"))
    panels = all_panels(read_runs([tmp_path]))
    tables = [caption for caption, _ in panels[1].tables if caption.startswith("Results")]
    assert tables == [
        "Results synthetic, accuracy: accuracy (%) at the end",
        "Results words: accuracy (%) at the end",
        "Results synthetic, perplexity: perplexity at the end",
    ]
    (curve,) = next(each.charts for each in panels if each.key == "progress")
    assert curve.title == "accuracy or perplexity against what was spent"
    assert "setting" in curve.filters


def test_python_runs_stand_under_the_name_of_their_method(tmp_path):
    """No config says what they are."""
    usual = {"seed": 1, "rounds": 1, "fleet": "uniform-2", "method": "fedavg", "clients_per_round": 2}
    for name, hidden, changes in (
        ("one", 8, {}), ("two", 8, {"seed": 2}), ("wide", 16, {}), ("other", 8, {"method": "fjord"}),
    ):  # fmt: skip
        train(tiny_mlp(hidden), vector_data(), folder=tmp_path / name, **{**usual, **changes})
    runs = {Path(run.folder).name: run for run in read_runs([tmp_path])}
    assert {name: (run.variant, run.seed) for name, run in runs.items()} == {
        "one": ("fedavg 84 parameters", 1),
        "two": ("fedavg 84 parameters", 2),
        "wide": ("fedavg 164 parameters", 1),
        "other": ("fjord", 1),
    }
    assert runs["one"].config["training"]["batch_size"] == 32


def test_a_folder_that_does_not_say_what_it_is_is_like_no_other(tmp_path):
    for name in "ab":
        place = write_run(tmp_path / name, "fjord", 0.9, 1, 3)
        (place / "config.toml").unlink()
    first, second = read_runs([tmp_path])
    assert first.variant != second.variant
    assert not first.repeats
