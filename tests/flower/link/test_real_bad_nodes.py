"""Nodes that misbehave, drop out, come late, over a real SuperLink: the model is that of the rounds without them."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from flwr.app import Message

from fedtailor.config import make_config
from fedtailor.engines.flower.post import parcel_of
from fedtailor.flower.local import LocalLink, local_link
from fedtailor.flower.server import serve
from fedtailor.flower.submit import submit
from fedtailor.record import RoundRecord
from flower.link.real import parts, there
from flower.link.spoiled import DEADLINE, HOW, spoiled_apps
from flower.link.warm import warm_processes
from flower.loopback import LoopbackGrid, Spoil
from flower.test_bad_nodes import spoiled
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights

pytestmark = pytest.mark.slow
BASE = CONFIG.replace("{method}", "fedavg")
BASE = BASE.replace("workers = 0", "workers = 0\nstrikes = 0\nwait = 300\nquorum = 0.25")


@pytest.fixture(autouse=True)
def _apps(monkeypatch: pytest.MonkeyPatch) -> Any:
    with spoiled_apps(monkeypatch):
        yield


def add_node(link: LocalLink, number: int, config: dict[str, object], how: str = "") -> None:
    with patch.dict(os.environ, {HOW: how}):
        link.add_node(number, config)


def refusing(rounds: set[int]) -> Spoil:
    """A node that says in these rounds that it cannot."""
    at = 0

    def spoil(reply: Message) -> Message:
        nonlocal at
        at += "answers" in parcel_of(reply.content).head
        return spoiled(
            reply, lambda head, pieces: ({"error": "no room"}, {}) if at in rounds else (head, pieces)
        )

    return spoil


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_nan_wrong_shapes_and_old_answers_leave_no_trace(tmp_path: Path) -> None:
    count, folder = 5, tmp_path / "link"
    text = BASE.replace("clients_per_round = 3", f"clients_per_round = {count}")
    with warm_processes(folder / "warm"), local_link(folder, []) as link:
        for number, how in enumerate(["", "", "nan", "longer", "replaying"]):
            add_node(link, number, parts(folder, count)[number], how)
        link.wait_for_nodes(count)
        submit(text, tmp_path / "run", there(link), lambda _: None)
    told = [row["refused_by"] for row in rows_of(tmp_path / "run")]
    bad = {"2": {"non-finite": 1}, "3": {"unreadable": 1}}
    assert told == [bad, {**bad, "4": {"wrong-round": 1}}, {**bad, "4": {"wrong-round": 1}}]
    nodes = {number: parts(tmp_path / "replica", count)[number] for number in range(count)}
    spoil = {2: refusing({1, 2, 3}), 3: refusing({1, 2, 3}), 4: refusing({2, 3})}
    serve(LoopbackGrid(text, nodes, spoil), make_config(tomllib.loads(text)), tmp_path / "without")
    assert not differing(final_weights(tmp_path / "without"), final_weights(tmp_path / "run"))


def test_nodes_drop_out_answer_late_and_join_in_the_third_round(tmp_path: Path) -> None:
    """Of six devices two are killed and one sleeps through the second round, after which a seventh is there.

    The second round lasts until its deadline, which is longer than a SuperLink takes a killed node for connected.
    """
    folder, run, count, rounds = tmp_path / "link", tmp_path / "run", 6, 4
    text = BASE.replace("clients_per_round = 3", f"clients_per_round = {count}")
    text = text.replace("rounds = 3", f"rounds = {rounds}")
    text = text.replace("strikes = 0", f"strikes = 0\ndeadline = {DEADLINE}")
    with warm_processes(folder / "warm"), local_link(folder, []) as link:
        for number in range(count):
            add_node(link, number, device(folder, number), "late" if number == 3 else "")
        link.wait_for_nodes(count)

        def follow(line: str) -> None:
            if line.startswith("round 1 "):
                for number in (4, 5):
                    link.stop(f"node{number}", signal.SIGKILL)
                add_node(link, 6, device(folder, 6))

        submit(text, run, there(link), follow)
    rows = rows_of(run)
    assert [(row["round"], row["merged"]) for row in rows] == [(1, 6), (2, 3), (3, 5), (4, 5)]
    assert set(rows[1]["refused_by"]) == {"3", "4", "5"}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = {(event["event"], event.get("client")) for event in events}
    assert {("left", "device-4"), ("left", "device-5"), ("joined", "device-6")} <= told
    serve_without(text, tmp_path)
    assert not differing(final_weights(tmp_path / "without"), final_weights(run))


def device(folder: Path, number: int) -> dict[str, object]:
    said: dict[str, object] = {"name": f"device-{number}", "dataset": "digits", "tier": "1"}
    return {**said, "state": str(folder / f"client{number}")}


def serve_without(text: str, tmp_path: Path) -> None:
    """The same rounds where those who were away say that they cannot."""
    nodes = {number: device(tmp_path / "replica", number) for number in range(6)}

    def follow(record: RoundRecord) -> None:
        if record.round == 2:
            nodes.update({6: device(tmp_path / "replica", 6)})
            for number in (4, 5):
                del nodes[number]

    spoil = {number: refusing({2}) for number in (3, 4, 5)}
    grid = LoopbackGrid(text, nodes, spoil)
    serve(grid, make_config(tomllib.loads(text)), tmp_path / "without", follow)
