"""Bytes on the wire between a SuperNode and the SuperLink, counted by a proxy between them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.flower.local import local_link
from fedtailor.flower.submit import submit
from flower.link.proxy import counting_proxy
from flower.link.real import parts, there
from flower.link.warm import warm_processes
from flower.test_same_bits import CONFIG

pytestmark = pytest.mark.slow
ROUNDS = 3
TEXT = CONFIG.replace("{method}", "heterofl").replace("clients = 5", "clients = 1")
TEXT = TEXT.replace("clients_per_round = 3", "clients_per_round = 1")
TEXT = TEXT.replace("evaluate_every = 1", "evaluate_every = 3")
TEXT = TEXT.replace('name = "cnn"\nchannels = [4, 6]', 'name = "mlp"\nhidden = [HIDDEN, 1000]')
TEXT = TEXT.replace('name = "uniform-2"', 'name = "equal-1/2"')
IDLE = 20.0  # seconds over which the traffic of a node that does nothing is measured


@pytest.mark.parametrize("hidden", [1000, 4000], ids=["1 MB", "4 MB"])
def test_bytes_on_the_wire_are_those_of_the_cut(hidden: int, tmp_path: Path) -> None:
    text, folder = TEXT.replace("HIDDEN", str(hidden)), tmp_path / "link"
    with warm_processes(folder / "warm"), local_link(folder, []) as link, counting_proxy(link.port) as wire:
        replace(link, port=wire.port).add_node(0, parts(folder, 1)[0])
        link.wait_for_nodes(1)
        idle, began = wire.seen(), time.monotonic()
        time.sleep(IDLE)
        asking = [
            (after - before) / (time.monotonic() - began)
            for before, after in zip(idle, wire.seen(), strict=True)
        ]
        before, began = wire.seen(), time.monotonic()
        submit(text, tmp_path / "run", there(link), lambda _: None)
        seconds = time.monotonic() - began
        up, down = (after - was for was, after in zip(before, wire.seen(), strict=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    cut_down, cut_up = (sum(row[name] for row in rows) for name in ("bytes_down", "bytes_up"))
    print(f"{seconds:.0f} s; idle: {asking[0]:.0f} up, {asking[1]:.0f} down, bytes per second")
    for way, cut, passed, rate in (("down", cut_down, down, asking[1]), ("up", cut_up, up, asking[0])):
        paid = passed - rate * seconds
        print(
            f"{way}: cut {cut}, wire {passed} (+{passed / cut - 1:.2%}), +{paid / cut - 1:.2%} without asking"
        )
        assert cut >= ROUNDS * 1e6
        assert cut < passed
        # A node asks for work every few seconds, however long a round takes: that is not part of a payload.
        assert paid < 1.05 * cut
