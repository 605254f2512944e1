"""The commands as a person calls them: output, JSON, errors and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import call, small_config
from fedtailor.cli.output import console


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "width", 120)
    small_config(tmp_path)
    return tmp_path


def test_run_writes_its_folder_and_shows_every_tier(folder, monkeypatch, capsys):
    assert call(monkeypatch, "run", "small.toml") == 0
    shown = capsys.readouterr()
    for tier in ("0.2", "0.4", "0.6", "0.8", "1"):
        assert f" {tier} " in shown.out
    assert "runs/small/" in shown.out
    assert "round 2/2" in shown.err  # plain lines where there is no terminal
    rows = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    for key in ("tiers", "bytes_up", "bytes_down", "macs", "clients", "refused"):
        assert key in rows[-1]
    assert set(rows[-1]["tiers"]["1"]) == {"loss", "accuracy"}
    environment = json.loads((folder / "runs/small/environment.json").read_text())
    assert environment["packages"]["torch"]
    assert (folder / "runs/small/weights.safetensors").is_file()


def test_run_again_from_its_own_resolved_config_gives_the_same_numbers(folder, monkeypatch, capsys):
    assert call(monkeypatch, "run", "small.toml", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert call(monkeypatch, "run", "runs/small/config.toml", "--set", "name=again", "--json") == 0
    second = json.loads(capsys.readouterr().out)
    assert first["tiers"] == second["tiers"]
    assert call(monkeypatch, "run", "small.toml", "--set", "name=other", "--set", "seed=4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tiers"] != first["tiers"]


def test_an_existing_run_is_never_overwritten(folder, monkeypatch, capsys):
    call(monkeypatch, "run", "small.toml")
    before = {file: file.read_bytes() for file in (folder / "runs/small").iterdir() if file.is_file()}
    capsys.readouterr()
    assert call(monkeypatch, "run", "small.toml") == 2
    assert "exists already" in capsys.readouterr().err
    assert before == {file: file.read_bytes() for file in before}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.name=heterfl"], ["unknown method 'heterfl'", "did you mean 'heterofl'"]),
        (["data.dataset=digit"], ["unknown dataset 'digit'", "did you mean 'digits'"]),
        (["model.name=cnnn"], ["unknown model 'cnnn'"]),
        (["model.channel=[4]"], ["channel", "channels"]),
        (["data.clients=3"], ["3 client(s) for 5 tiers"]),
        (["clients_per_round=9"], ["clients_per_round = 9", "at most 5"]),
        (["data.clients=200"], ["200"]),
        (["training.batch_size=1"], ["batch_size = 1", "batch norm"]),
        (
            ["data.min_examples=1", "data.partition=quantity", "data.skew=8", "data.clients=40"],
            ["batch norm"],
        ),
        (["device=cuda"], ["device = 'cuda'", "not available"]),
        (
            ["method.name=heterofl", "fleet.tiers=[{name='tiny', macs=2}]"],
            ["macs is limited to 2", "smallest cut"],
        ),
    ],
)
def test_what_cannot_start_says_why_and_writes_nothing(folder, monkeypatch, capsys, overrides, words):
    settings = [word for override in overrides for word in ("--set", override)]
    assert call(monkeypatch, "run", "small.toml", *settings) == 2
    said = capsys.readouterr().err.splitlines()
    shown = "\n".join(
        line for line in said if not line.startswith(("note: ", "small ("))
    )  # and steps on the way
    assert shown.startswith("error: ")
    for word in words:
        assert word in shown
    assert not (folder / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(folder, monkeypatch, capsys):
    (folder / "runs").write_text("a file, not a folder")
    assert call(monkeypatch, "run", "small.toml") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_init_writes_a_config_that_loads_and_keeps_an_existing_file(folder, monkeypatch, capsys):
    from fedtailor.config import load_config

    assert call(monkeypatch, "init") == 0
    assert load_config(folder / "fedtailor.toml").name == "first"
    text = (folder / "fedtailor.toml").read_text()
    assert call(monkeypatch, "init") == 2
    assert "exists already" in capsys.readouterr().err
    assert (folder / "fedtailor.toml").read_text() == text


def test_compare_runs_each_method_once_and_skips_finished_ones(folder, monkeypatch, capsys):
    words = ("compare", "small.toml", "--methods", "heterofl,fedavg:width=1/5", "--seeds", "2")
    assert call(monkeypatch, *words) == 0
    shown = capsys.readouterr()
    assert "±" in shown.out
    assert "fedavg:width=1/5" in shown.out
    runs = sorted(path.name for path in (folder / "runs/small").iterdir() if path.is_dir())
    assert runs == ["fedavg-width-1-5-seed3", "fedavg-width-1-5-seed4", "heterofl-seed3", "heterofl-seed4"]
    times = {path: path.stat().st_mtime_ns for path in (folder / "runs/small").rglob("*") if path.is_file()}
    assert call(monkeypatch, *words, "--json") == 0
    again = capsys.readouterr()
    assert again.err.count("finished before") == 4
    methods = json.loads(again.out)["methods"]
    assert [method["method"] for method in methods] == ["heterofl", "fedavg:width=1/5"]
    assert methods[0]["tiers"]["1"]["accuracy"]["deviation"] >= 0
    small = methods[1]["tiers"]
    assert small["0.2"] == small["1"]  # FedAvg has one network for all tiers
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.slow
def test_one_model_per_tier_is_one_row(folder, monkeypatch, capsys):
    """FjORD's baseline: each tier's figures come from the run of its own width, the costs are those of all runs."""
    words = (
        "compare",
        "small.toml",
        "--set",
        "fleet.name=uniform-2",
        "--methods",
        "efd:global_width=each",
        "--json",
    )
    assert call(monkeypatch, *words) == 0
    (row,) = json.loads(capsys.readouterr().out)["methods"]
    alone = {}
    for width in ("1/2", "1"):
        name = f"efd-global_width-{width.replace('/', '-')}-seed3"
        rows = [
            json.loads(line)
            for line in (folder / f"runs/small/{name}/metrics.jsonl").read_text().splitlines()
        ]
        alone[width] = rows
    assert row["tiers"]["0.5"]["accuracy"]["mean"] == alone["1/2"][-1]["tiers"]["0.5"]["accuracy"]
    assert row["tiers"]["1"]["accuracy"]["mean"] == alone["1"][-1]["tiers"]["1"]["accuracy"]
    sent = [each["bytes_up"] + each["measuring"]["bytes_up"] for rows in alone.values() for each in rows]
    assert row["runs"][0]["bytes_up"] == sum(sent)
    flops = ("--set", "fleet.name=flops-0.2-1.0")
    assert call(monkeypatch, "compare", "small.toml", *flops, "--methods", "efd:global_width=each") == 2
    assert "tiers have widths" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_says_which_method_was_given_more(folder, monkeypatch, capsys):
    """FjORD's teacher is one more network in every step; it is sent and holds nothing more for it."""
    words = (
        "compare",
        "small.toml",
        "--methods",
        "fjord,fjord:distillation=false",
        "--set",
        "fleet.name=uniform-2",
        "--set",
        "clients_per_round=5",
    )
    assert call(monkeypatch, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)["fairness"]
    spent = {}
    for name in ("fjord", "fjord-distillation-false"):
        lines = (folder / f"runs/small/{name}-seed3/metrics.jsonl").read_text().splitlines()
        tiers = [json.loads(line)["by_tier"]["1"] for line in lines]
        spent[name] = sum(tier["macs"] for tier in tiers) / sum(tier["answered"] for tier in tiers)
    ratio = told["methods"]["fjord"]["1"]["of_others"]
    assert ratio["macs"] == pytest.approx(spent["fjord"] / spent["fjord-distillation-false"])
    assert ratio["macs"] > 1.3
    assert (ratio["bytes"], ratio["parameters"]) == (1, 1)
    (first, *_) = told["unequal"]
    assert first.startswith("fjord spends ")
    assert "x the MACs of fjord:distillation=false (" in first
    assert call(monkeypatch, *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Unequal budgets, per client and round: {first}" in shown


@pytest.mark.slow
def test_compare_says_nothing_about_budgets_that_are_equal(folder, monkeypatch, capsys):
    methods = "heterofl:norm=averaged,fedrolex:norm=averaged"
    assert call(monkeypatch, "compare", "small.toml", "--methods", methods) == 0
    shown = capsys.readouterr().out
    assert "Unequal" not in shown
    assert "not compared" not in shown
    assert call(monkeypatch, "compare", "small.toml", "--methods", methods, "--json") == 0
    told = json.loads(capsys.readouterr().out)["fairness"]
    assert (told["unequal"], told["not_recorded"]) == ([], [])
    tiers = told["methods"]["fedrolex:norm=averaged"].values()
    assert {ratio for tier in tiers for ratio in tier["of_others"].values()} == {1}


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("fedavg,fedavg", "every method once"),
        ("fedavg:width", "name:key=value"),
        ("fedavgg", "did you mean 'fedavg'"),
        (",", "at least one name"),
    ],
)
def test_compare_refuses_bad_method_lists_before_anything_runs(folder, monkeypatch, capsys, methods, words):
    assert call(monkeypatch, "compare", "small.toml", "--methods", methods) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_compare_refuses_a_finished_run_of_another_config(folder, monkeypatch, capsys):
    call(monkeypatch, "compare", "small.toml", "--methods", "fedavg")
    capsys.readouterr()
    assert call(monkeypatch, "compare", "small.toml", "--methods", "fedavg", "--set", "training.lr=0.5") == 2
    assert "another configuration" in capsys.readouterr().err


def test_profile_shows_published_counts(monkeypatch, capsys):
    assert call(monkeypatch, "profile", "cnn", "--fleet", "a1-e1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["tier"]: row["params"] for row in rows}["a"] == 1_556_874
    assert rows[0]["tier"] == "e"
    assert rows[0]["params"] < 10_000
    assert (
        call(monkeypatch, "profile", "heterofl-resnet", "--input", "3x32x32", "--fleet", "equal", "--json")
        == 0
    )
    assert json.loads(capsys.readouterr().out)[0]["params"] == 9_622_090
    assert (
        call(monkeypatch, "profile", "preresnet18", "--input", "3x32x32", "--fleet", "equal", "--json") == 0
    )
    assert json.loads(capsys.readouterr().out)[0]["params"] == 11_172_170


def test_profile_of_a_run_shows_what_its_method_gives_each_tier(monkeypatch, capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        """
        [data]
        dataset = "digits"
        [model]
        name = "mlp"
        [method]
        name = "fjord"
        [[fleet.tiers]]
        name = "half"
        width = 0.5
        [[fleet.tiers]]
        name = "all"
        width = 1
        """,
        encoding="utf-8",
    )
    assert call(monkeypatch, "profile", str(file), "--json") == 0
    captured = capsys.readouterr()
    assert [(row["tier"], row["width"]) for row in json.loads(captured.out)] == [
        ("half", "2/5"),
        ("all", "1"),
    ]
    assert "tier half may have width 1/2 and gets at most 2/5" in " ".join(captured.err.split())
    smaller = ("--set", 'fleet.tiers=[{name = "chip", macs = 10}, {name = "all", width = 1}]')
    assert call(monkeypatch, "profile", str(file), *smaller, "--json") == 0
    captured = capsys.readouterr()
    assert [row["tier"] for row in json.loads(captured.out)] == ["all"]
    assert "tier 'chip' takes no part: Budget(macs=10): no width of method.widths fits it" in " ".join(
        captured.err.split()
    )


def test_profile_of_ones_own_module(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(
        "from torch import nn\n"
        "def build(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, num_classes))\n"
    )
    assert call(monkeypatch, "profile", "mine:net", "--json") == 0
    assert json.loads(capsys.readouterr().out)[-1]["params"] == 784 * 8 + 8 + 80 + 10
    assert call(monkeypatch, "profile", "mine:nothing") == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--input", "3by32"), ("--classes", "0"), ("--fleet", "z9")])
def test_profile_refuses_nonsense(monkeypatch, capsys, words):
    assert call(monkeypatch, "profile", "cnn", *words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_listings_as_tables_and_as_json(monkeypatch, capsys):
    from fedtailor.data.datasets import dataset_names
    from fedtailor.methods.registry import method_names

    assert call(monkeypatch, "methods", "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == method_names()
    assert call(monkeypatch, "methods") == 0
    assert "heterofl" in capsys.readouterr().out
    assert call(monkeypatch, "methods", "heterofl") == 0
    assert "HeteroFL" in capsys.readouterr().out
    assert call(monkeypatch, "methods", "hetero") == 2
    assert "unknown method" in capsys.readouterr().err
    assert call(monkeypatch, "datasets", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == set(dataset_names())
    assert call(monkeypatch, "datasets") == 0
    assert "digits" in capsys.readouterr().out


def test_version(monkeypatch, capsys):
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("fedtailor 0.")


def test_how_often_is_evaluated_is_settled_said_and_written(folder, monkeypatch, capsys):
    from fedtailor.config import load_config

    file = folder / "small.toml"
    file.write_text(file.read_text().replace("evaluate_every = 1\n", "").replace("rounds = 2", "rounds = 3"))
    assert call(monkeypatch, "run", "small.toml") == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: every tier")]
    every = load_config(folder / "runs/small/config.toml").evaluate_every
    assert every == 3
    assert "once, at the end" in said
    assert call(monkeypatch, "resume", "runs/small") == 0  # the same settings: no drift
