"""Devices of their own: each has its data, its name and its limits, and the server has test examples alone."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from flwr.app import Message

from fedtailor.config import make_config
from fedtailor.engines.flower.post import parcel_of
from fedtailor.flower.server import serve
from fedtailor.report.live import WAITING, look
from fedtailor.run.result import Run
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
        "laptop": {"dataset": write_examples(tmp_path / "laptop.npz", 40, 3), "params": "1M"},
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
    check_what_is_watched(tmp_path / "run", run)
    held = {tier: spent.parameters for tier, spent in run.history[0].by_tier.items()}
    assert held["0.5"] < 2 * held["1"]  # two clients, of which one brought a limit of 100 parameters


def test_one_device_is_enough_for_a_fleet_of_five_tiers(tmp_path: Path) -> None:
    """Norm statistics come from clients, so that how often to evaluate is worked out from who is there."""
    text = CONFIG.replace("{server}", "digits").replace("uniform-2", "uniform-5")
    text = text.replace("clients_per_round = 3\nevaluate_every = 1", "clients_per_round = 1")
    text = text.replace('"mlp"\nhidden = [16]', '"cnn"\nchannels = [4, 5]\nnorm = "batch"')
    node = {"name": "phone", "state": str(tmp_path / "phone"), "dataset": "digits", "params": "1M"}
    run = serve(LoopbackGrid(text, {7: node}), make_config(tomllib.loads(text)), tmp_path / "run")
    assert [record.cohort.merged for record in run.history] == [1, 1]
    assert len(run.history[-1].tiers) == 5


def check_what_is_watched(folder: Path, run: Run) -> None:
    """Who is connected, which tier, the last answer, and every byte that went to and fro."""
    shown = json.loads((folder / "devices.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in shown["clients"]}
    assert {name: row["tier"] for name, row in rows.items()} == {
        "board": "0.5",
        "phone": "0.5",
        "laptop": "1",
    }
    assert rows["phone"]["limits"] == "params 100"
    assert all(row["connected"] and row["last_answer"] and row["asked"] >= 2 for row in rows.values())
    assert sum(spent["down"] for spent in shown["tiers"].values()) == sum(
        row["down"] for row in rows.values()
    )
    spent = [record.training for record in run.history]
    assert sum(row["down"] for row in rows.values()) > sum(each.bytes_down for each in spent)
    state, panels = look(folder)
    panel = next(each for each in panels if each.key == "devices")
    assert [caption.split(" at ")[0] for caption, _ in panel.tables] == [
        "Clients",
        "Traffic by tier, all that was sent and received",
    ]
    assert [row["client"] for row in panel.tables[0][1]] == ["board", "laptop", "phone"]
    assert "finished" in state


def joined(folder: Path) -> list[dict[str, object]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == "joined"]


def test_numbers_belong_to_names(tmp_path: Path) -> None:
    """Whoever is faster: numbers of a fresh run follow the names, those of a resumed one stay, and it waits for all."""
    text = CONFIG.replace("{server}", write_examples(tmp_path / "server.npz", 24, 3))
    text = text.replace("clients_per_round = 3", "clients_per_round = 2").replace("rounds = 2", "rounds = 3")
    data = write_examples(tmp_path / "all.npz", 20, 3)
    names = ("c", "a", "d", "b")
    nodes = {
        number: {"name": name, "dataset": data, "tier": "1", "state": str(tmp_path / name)}
        for number, name in enumerate(names)
    }

    def stop(record: object) -> None:
        (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "kept")
        seen.append(look(tmp_path / "run")[0])  # as it was before the first round had ended
        (tmp_path / "kept").rename(tmp_path / "run" / "metrics.jsonl")
        raise RuntimeError("killed")

    def numbers() -> dict[str, int]:
        known = json.loads((tmp_path / "run" / "clients.json").read_text(encoding="utf-8"))
        return dict(known["clients"])

    config = make_config(tomllib.loads(text))
    seen: list[str] = []
    first = LoopbackGrid(text, {number: nodes[number] for number in (0, 1, 2)})
    with pytest.raises(RuntimeError, match="killed"):
        serve(first, config, tmp_path / "run", stop)
    assert numbers() == {"a": 0, "c": 1, "d": 2}
    assert seen == [f"{WAITING}; 3 of 3 clients connected"]
    late = {
        90: nodes[3],
        91: nodes[2],
        92: nodes[1],
    }  # under other numbers of nodes, and one of them comes last
    grid = Filling(text, dict(late), {93: nodes[0]})
    run = serve(grid, config, tmp_path / "run")
    assert numbers() == {"a": 0, "c": 1, "d": 2, "b": 3}
    assert run.state.round == 3
    assert grid.looks[93] < grid.looks["tasks"]  # nobody was asked before the last one had come


class Filling(LoopbackGrid):
    """A grid that more nodes come to, at the third look."""

    def __init__(
        self, config: str, nodes: dict[int, dict[str, Any]], later: dict[int, dict[str, Any]]
    ) -> None:
        super().__init__(config, nodes)
        self.later, self.looked = later, 0
        self.looks: dict[object, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        self.looked += 1
        if self.looked == 3:
            self.nodes.update(self.later)
            self.looks.update(dict.fromkeys(self.later, self.looked))
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        listed = list(messages)
        if any(parcel_of(message.content).head["ask"] == "tasks" for message in listed):
            self.looks.setdefault("tasks", self.looked)
        return super().push_messages(listed)
