"""The files of a small run, before they are mutated."""

from __future__ import annotations

import json

from fedtailor.record import Cohort, Covered, RoundRecord, Spent
from fedtailor.storage.rows import as_line, coverage_line

CONFIG = """name = "x"
seed = 3
rounds = 20
[data]
dataset = "digits"
clients = 5
alpha = 0.5
[model]
name = "cnn"
channels = [4, 8]
[fleet]
tiers = [{ name = "a", width = 0.5, share = 1 }, { name = "b", width = 1, share = 2 }]
[method]
name = "fjord"
[engine]
deadline = 10.5
"""


def records() -> list[RoundRecord]:
    """What a small run leaves."""
    tiers = {"a": {"loss": 1.5, "accuracy": 0.5}, "b": {"loss": 1.0, "accuracy": 0.75}}
    covered = (Covered(2, {"channels": {"conv1": 2}, "tag": "1/2"}),)
    return [
        RoundRecord(
            number, Cohort(3, 2, {"late": 1}, refused_by={"2": {"late": 1}}), Spent(10, 20, 30), train_loss=1.25,
            tiers=tiers, best_round=1, deployed={"a": {"params": 5, "macs": 7}}, reported={"1": {"x": 0.5}},
            method={"stage": "one"}, coverage=covered, failed={"KeyError: 1": ["2"]},
        )
        for number in (1, 2)
    ]  # fmt: skip


def run_files() -> dict[str, bytes]:
    """The files of a run that reports read."""
    setup = {
        "tiers": [{"name": "a", "clients": 2, "width": 0.5, "params": 5, "macs": 7, "allowed": {"macs": 9}},
                  {"name": "b", "clients": 2, "width": 1.0, "params": 9, "macs": 9, "allowed": {}}],
        "data": {"dataset": "x", "clients": 4, "train_examples": 9, "skew": 0.5, "label_counts": [5, 4],
                 "rows": [{"client": 0, "name": "a", "examples": 5, "label_counts": [3, 2]}]},
        "groups": {"conv1": 4},
        "layers": {"conv1.weight": [{"length": 4, "axes": [["conv1", 0, 1, 1, 1]]}, {"length": 1, "axes": []}]},
    }  # fmt: skip
    plan = {"folder": ".", "variant": "x", "cell": {"a": "b"}, "tier": ""}
    event = {"event": "round", "round": 1, "seconds": 0.5, "failed": {"KeyError: 1": ["2"]}}
    return {
        "metrics.jsonl": b"".join(as_line(each.as_row()) for each in records()),
        "coverage.jsonl": b"".join(as_line(coverage_line(each)) for each in records()),
        "events.jsonl": as_line(event),
        "setup.json": json.dumps(setup).encode(),
        "config.toml": CONFIG.encode(),
        "environment.json": b'{"packages": {"torch": "2.13.0"}, "threads": 1}',
        "comparison.json": json.dumps({"runs": [plan]}).encode(),
        "weights.safetensors": b"",
    }
