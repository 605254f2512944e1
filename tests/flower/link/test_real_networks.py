"""SuperNodes on machines of their own, behind slow links that break."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.flower.keys import write_node_key
from fedtailor.flower.link import CONNECTION
from fedtailor.flower.local import local_link
from flower.link.namespaces import HUB_ADDRESS, cut_off, inside, machines, passed
from flower.link.real import Command, parts, rounds_in, run_here, wait_until
from flower.link.warm import warm_processes
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights

pytestmark = pytest.mark.slow
RATE, PARTITION, ROUNDS = "4mbit", 20.0, 5
TEXT = CONFIG.replace("{method}", "heterofl").replace("rounds = 3", f"rounds = {ROUNDS}")
TEXT = TEXT.replace("clients_per_round = 3", "clients_per_round = 4").replace("clients = 5", "clients = 4")
TEXT = TEXT.replace('name = "cnn"\nchannels = [4, 6]', 'name = "mlp"\nhidden = [400, 300]')
TEXT = TEXT.replace("workers = 0", "workers = 0\nquorum = 1.0\nretries = 0\ndeadline = 240\nwait = 240")


def test_a_partition_of_20_seconds_heals(tmp_path: Path) -> None:
    """Both nodes lose the SuperLink in the middle of a round; nothing is lost, and nothing counts twice."""
    folder, run = tmp_path / "link", tmp_path / "same"
    (tmp_path / "run.toml").write_text(TEXT, encoding="utf-8")
    run_here(TEXT, tmp_path / "here")
    with (
        machines(["a", "b"], RATE), inside("hub"), warm_processes(folder / "warm"),
        local_link(folder, [], HUB_ADDRESS) as link,
    ):  # fmt: skip
        for number, machine in enumerate(("a", "b")):
            public = write_node_key(folder / f"node{number}.key")
            link.flwr("supernode", "register", str(public), CONNECTION)
            with inside(machine):
                link.add_node(number, parts(folder, 2)[number])
        link.wait_for_nodes(2)
        words = ["run", str(tmp_path / "run.toml"), "--runs", str(tmp_path)]
        command = Command(tmp_path / "0.log", link, *words)
        try:
            wait_until(lambda: rounds_in(run) >= 2 or command.process.poll() is not None, 400, "two rounds")
            assert command.process.poll() is None, command.said
            time.sleep(1)  # the next round has begun
            for machine in ("a", "b"):
                cut_off(machine, True)
            before = rounds_in(run), passed("a")[1], passed("b")[1]
            time.sleep(PARTITION)
            assert (rounds_in(run), passed("a")[1], passed("b")[1]) == before
            for machine in ("a", "b"):
                cut_off(machine, False)
            assert command.end(600) == 0, command.said
        finally:
            command.stop()
        print("bytes up and down:", {machine: passed(machine) for machine in ("a", "b")})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["round"], row["merged"]) for row in rows] == [(number, 4) for number in range(1, ROUNDS + 1)]
    assert not differing(final_weights(tmp_path / "here"), final_weights(run))
