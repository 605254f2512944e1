"""Devices of their own: each has its data, its name and its limits, and the server has test examples alone."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.config import make_config
from fedtailor.flower.server import serve
from flower.loopback import LoopbackGrid

CONFIG = """
name = "devices"
rounds = 2
clients_per_round = 3
evaluate_every = 1
[data]
dataset = "{server}"
validation = 0
[model]
name = "mlp"
hidden = [16]
[fleet]
name = "uniform-2"
[method]
name = "heterofl"
[training]
batch_size = 8
[engine]
workers = 0
wait = 5
"""


def write_examples(path: Path, count: int, classes: int) -> str:
    draw = np.random.default_rng(count)
    x, y = draw.normal(size=(count, 6)).astype(np.float32), np.arange(count) % classes
    np.savez(path, x_train=x, y_train=y, x_test=x[:12], y_test=y[:12])
    return str(path)


def test_devices_bring_their_own_data_names_and_limits(tmp_path: Path) -> None:
    """The board's examples are of two classes alone; the network has an output for each of the server's three."""
    server = write_examples(tmp_path / "server.npz", 24, 3)
    text = CONFIG.replace("{server}", server)
    said = {
        "board": {"dataset": write_examples(tmp_path / "board.npz", 20, 2), "tier": "0.5"},
        "phone": {"dataset": write_examples(tmp_path / "phone.npz", 30, 3), "params": "100"},
        "laptop": {"dataset": write_examples(tmp_path / "laptop.npz", 40, 3), "tier": "1"},
    }
    nodes = {
        number: {"name": name, "state": str(tmp_path / name), **config}
        for number, (name, config) in enumerate(said.items(), start=7)
    }
    run = serve(LoopbackGrid(text, nodes), make_config(tomllib.loads(text)), tmp_path / "run")
    assert not run.history[-1].cohort.refused
    examples = {"board": 20, "phone": 30, "laptop": 40}
    assert {event["client"]: event["examples"] for event in joined(tmp_path / "run")} == examples
    known = json.loads((tmp_path / "run" / "clients.json").read_text(encoding="utf-8"))
    assert sorted(known["clients"].values()) == [0, 1, 2]
    assert known["parts"] is None
    assert len(run.data.test) == 12
    assert {name: int(run.data.sizes[number]) for name, number in known["clients"].items()} == examples
    held = {tier: spent.parameters for tier, spent in run.history[0].by_tier.items()}
    assert held["0.5"] < 2 * held["1"]  # two clients, of which one brought a limit of 100 parameters


def joined(folder: Path) -> list[dict[str, object]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == "joined"]
