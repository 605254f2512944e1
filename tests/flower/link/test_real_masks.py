"""Rounds under masks over a real SuperLink: a process for every message, secrets on disk between them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")
pytest.importorskip("cryptography", reason="the extra fedtailor[secure] is not installed")

from fedtailor.flower.local import local_link
from fedtailor.flower.submit import submit
from flower.link.real import parts, there
from flower.link.spoiled import HOW, spoiled_apps
from flower.link.warm import warm_processes
from flower.masked.runs import CONFIG, here
from helpers import differing, final_weights

pytestmark = pytest.mark.slow
NODES = 4  # of which the last answers for client 3 alone
TEXT = CONFIG.replace("wait = 5", "wait = 300")


@pytest.fixture(autouse=True)
def _apps(monkeypatch: pytest.MonkeyPatch) -> Any:
    with spoiled_apps(monkeypatch):
        yield


def test_the_bits_of_the_run_in_process_also_where_a_device_loses_its_secrets(tmp_path: Path) -> None:
    """All six clients are there in the first round; in the second one has lost its secrets when it is to train."""
    folder = tmp_path / "link"
    with warm_processes(folder / "warm"), local_link(folder, []) as link:
        for number, config in enumerate(parts(folder, NODES)):
            with patch.dict(os.environ, {HOW: "forgetful" if number == 3 else ""}):
                link.add_node(number, config)
        link.wait_for_nodes(NODES)
        submit(TEXT, tmp_path / "there", there(link), lambda _: None)
    assert not differing(here(TEXT, lost=(3,), since=1)[1], final_weights(tmp_path / "there"))
    events = [json.loads(line) for line in (tmp_path / "there" / "events.jsonl").read_text().splitlines()]
    refused = [each for each in events if each["event"] == "secure refused"]
    assert [(each["client"], each["step"]) for each in refused] == [("3", "mask")]
    assert "has no secrets of this round" in refused[0]["reason"]
    assert not list(folder.glob("client*/**/secrets-*"))
