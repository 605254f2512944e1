"""A SuperNode that was killed and is started again at once is let in again, and takes part."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.flower.link import Link
from fedtailor.flower.local import local_link
from fedtailor.flower.submit import submit
from flower.test_same_bits import CONFIG

LOST_SECONDS = 60 + 30 + 60  # two heartbeats, the next try, and a slow machine


@pytest.mark.slow
def test_a_killed_node_is_let_in_again(tmp_path: Path) -> None:
    parts = [
        {"partition-id": n, "num-partitions": 2, "state": str(tmp_path / f"client{n}")} for n in range(2)
    ]
    text = CONFIG.replace("{method}", "fedavg").replace("clients_per_round = 3", "clients_per_round = 5")
    with local_link(tmp_path / "link", parts) as link:
        link.stop("node1", signal.SIGKILL)
        link.add_node(1, parts[1])
        log, end = tmp_path / "link" / "node1.log", time.monotonic() + LOST_SECONDS
        while log.read_text(encoding="utf-8").count("SuperNode ID") < 2 and time.monotonic() < end:
            time.sleep(1)
        assert "Failed to activate SuperNode" in log.read_text(
            encoding="utf-8"
        )  # as long as it was thought alive
        assert link.online() == 2
        submit(text, tmp_path / "run", Link(link.address, link.authority), lambda _: None)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["merged"] for row in rows] == [5, 5, 5]
