"""A person's own files through the commands: what they are taken for, what is odd about them, who was refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from commands import call
from fedtailor.cli.output import console
from fedtailor.config import make_config
from fedtailor.models import build_model
from fedtailor.run.setup import prepare_config

CONFIG = """
name = "mine"
rounds = 2
clients_per_round = 4
evaluate_every = 2
[data]
dataset = "{dataset}"
clients = 4
[model]
name = "{model}"
hidden = {hidden}
[method]
name = "fedavg"
[fleet]
name = "uniform-2"
[training]
lr = 0.1
batch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "width", 120)
    return tmp_path


def write(folder: Path, dataset: str, model: str, hidden: object) -> None:
    (folder / "mine.toml").write_text(CONFIG.format(dataset=dataset, model=model, hidden=hidden))


def reviews(folder: Path) -> None:
    rows = [{"text": f"{'good' if row % 2 else 'dull'} film", "label": row % 2} for row in range(60)]
    (folder / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_labelled_text_is_classified_and_said_to_be_so(folder, monkeypatch, capsys):
    reviews(folder)
    write(folder, "reviews.jsonl", "text-classifier", 8)
    assert (
        call(
            monkeypatch,
            "run",
            "mine.toml",
            "--json",
            "--set",
            "training.lr=2.0",
            "--set",
            "training.epochs=5",
        )
        == 0
    )
    shown = capsys.readouterr()
    assert (
        "note: reviews.jsonl is taken for labelled text: 48 training and 12 test examples of 2 classes"
        in shown.err
    )
    assert "note: To say otherwise: [data] options = {" in shown.err
    assert shown.err.index("is taken for") < shown.err.index("round 2/2")
    assert json.loads(shown.out)["tiers"]["1"]["accuracy"] == 1.0
    setup = json.loads((folder / "runs/mine/setup.json").read_text())
    assert "is taken for labelled text" in setup["data"]["notices"][0]


@pytest.mark.parametrize("model", ["text-classifier", "char-lstm"])
def test_models_of_text_get_the_size_of_the_vocabulary(folder, model):
    reviews(folder)
    setup = prepare_config(
        make_config(
            {"data": {"dataset": "reviews.jsonl", "clients": 10}, "model": {"name": model, "hidden": 8}}
        )
    )
    assert setup.model.module.embedding.num_embeddings == 5  # padding, unknown, good, dull, film
    with_own = build_model(model, input_shape=(3,), num_classes=2, symbols=5, vocabulary=9)
    assert with_own.embedding.num_embeddings == 9


def test_odd_data_is_told_and_refused_clients_are_named(folder, monkeypatch, capsys):
    x, y = np.random.default_rng(0).normal(size=(80, 4)), np.arange(80) % 2
    x[3] = np.nan
    who = np.array(["anna", "bert", "cleo", "dora"] * 15)
    np.savez(
        "odd.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:], client_train=who,
        client_test=who[:20],
    )  # fmt: skip
    write(folder, "odd.npz", "mlp", [8])
    assert call(monkeypatch, "run", "mine.toml", "--set", "data.partition=natural") == 0
    shown = capsys.readouterr()
    assert (
        "note: odd.npz has NaN in the inputs (features 0, 1, 2, 3) of 1 training example (row 3)" in shown.err
    )
    assert "note: examples that are no numbers are held by client dora." in shown.err
    assert "Refused updates: 2 x diverged; of client dora (2 x)" in shown.out
    rows = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["refused_by"] for row in rows] == [{"3": {"diverged": 1}}] * 2
    assert call(monkeypatch, "data", "show", "mine.toml", "--set", "data.partition=natural") == 0
    assert "odd.npz has NaN in the inputs" in capsys.readouterr().out


def test_a_comparison_says_once_what_the_data_is(folder, monkeypatch, capsys):
    (folder / "mine.csv").write_text(
        "a,b,y\n" + "".join(f"{row % 5},{row % 3},{row % 2}\n" for row in range(60))
    )
    write(folder, "mine.csv", "mlp", [8])
    assert (
        call(monkeypatch, "compare", "mine.toml", "--methods", "fedavg", "--seeds", "2", "--jobs", "1") == 0
    )
    assert capsys.readouterr().err.count("mine.csv is taken for a table") == 1


def test_data_without_a_test_part_cannot_start(folder, monkeypatch, capsys):
    (folder / "mine.csv").write_text("a,y,split\n" + "".join(f"{row},{row % 2},train\n" for row in range(20)))
    write(folder, "mine.csv", "mlp", [8])
    assert call(monkeypatch, "run", "mine.toml") == 2
    assert "mine.csv has no test examples" in capsys.readouterr().err
