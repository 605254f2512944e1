"""A ClientApp that misbehaves as its SuperNode's environment says, for tests over a real SuperLink."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtailor.engines.flower.post import Parcel, content_of, parcel_of
from fedtailor.flower.apps import client as honest
from fedtailor.flower.apps import server
from flower.test_bad_nodes import longer, nan, with_values

__all__ = ["APP", "DEADLINE", "HOW", "client", "server", "spoiled_apps"]
APP = "from flower.link.spoiled import client, server\n\n__all__ = ['client', 'server']\n"
HOW = "FEDTAILOR_TEST_NODE"  # the variable that says how
DEADLINE = 100.0  # seconds of a round; a late node sleeps a little longer over its second task
client = ClientApp()


@contextmanager
def spoiled_apps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs bring the app that can misbehave along; the code of these tests is on every node."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with patch("fedtailor.flower.app_folder.APP", APP):
        yield


@client.train()
@client.evaluate()
@client.query()
def answer(message: Message, context: Context) -> Message:
    """What an honest node would answer, spoiled."""
    how, round = os.environ.get(HOW, ""), message.metadata.group_id
    if how == "forgetful" and round == "2" and "tasks" in parcel_of(message.content).head:
        for file in Path(str(context.node_config["state"])).rglob("secrets-*"):
            file.unlink()
    reply = honest(message, context)
    if how == "nan":
        return with_values(nan)(reply) or reply
    if how == "longer":
        return with_values(longer)(reply) or reply
    if how == "replaying":
        return _first_again(reply, Path(str(context.node_config["state"])) / "first.json")
    if how == "late" and round == "2":
        time.sleep(DEADLINE + 20)
    return reply


def _first_again(reply: Message, file: Path) -> Message:
    """The first answer to a task, again and again; every message has a process of its own, so it lies in a file."""
    parcel = parcel_of(reply.content)
    if "answers" not in parcel.head:
        return reply
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        pieces = {name: piece.hex() for name, piece in parcel.pieces.items()}
        file.write_text(json.dumps([parcel.head, pieces]), encoding="utf-8")
    head, pieces = json.loads(file.read_text(encoding="utf-8"))
    reply.content = content_of(Parcel(head, {name: bytes.fromhex(piece) for name, piece in pieces.items()}))
    return reply
