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
from flower.loopback import LoopbackGrid, Spoil
from flower.real import parts, rounds_in, there
from flower.spoiled import APP, HOW
from flower.test_bad_nodes import spoiled
from flower.test_same_bits import CONFIG
from flower.warm import warm_processes
from helpers import differing, final_weights

pytestmark = pytest.mark.slow
BASE = CONFIG.replace("{method}", "fedavg")
BASE = BASE.replace("workers = 0", "workers = 0\nstrikes = 0\nwait = 240\nquorum = 0.25")


@pytest.fixture(autouse=True)
def _apps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs bring the app that misbehaves along; the code of these tests is on every node."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with patch("fedtailor.flower.app_folder.APP", APP):
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
    """Of four devices one is killed and one sleeps through the second round; a fifth comes after it."""
    folder, run, deadline, rounds = tmp_path / "link", tmp_path / "run", 60, 5
    text = BASE.replace("clients_per_round = 3", "clients_per_round = 4").replace(
        "rounds = 3", f"rounds = {rounds}"
    )
    text = text.replace("strikes = 0", f"strikes = 0\ndeadline = {deadline}")
    devices: list[dict[str, object]] = [
        {"name": f"device-{n}", "dataset": "digits", "state": str(folder / f"client{n}")} for n in range(5)
    ]
    with warm_processes(folder / "warm"), local_link(folder, []) as link:
        for number, how in enumerate(["", "", "", "late"]):
            add_node(link, number, devices[number], how)
            link.wait_for_nodes(number + 1)
        seen = []

        def follow(line: str) -> None:
            seen.append(line)
            if rounds_in(run) == 1 and "node2" in link.processes:
                link.stop("node2", signal.SIGKILL)
            if rounds_in(run) == 2 and "node4" not in link.processes:
                add_node(link, 4, devices[4])

        submit(text, run, there(link), follow)
    rows = rows_of(run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = [(event["event"], event.get("client")) for event in events if event["event"] in ("joined", "left")]
    print([(row["round"], row["clients"], row["merged"], row.get("refused_by")) for row in rows], told)
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert rows[0]["merged"] == 4
    assert (rows[1]["merged"], set(rows[1]["refused_by"])) == (2, {"device-2", "device-3"})
    assert {("left", "device-2"), ("joined", "device-4")} <= set(told)
    assert (rows[-1]["merged"], rows[-1].get("refused_by", {})) == (4, {})
