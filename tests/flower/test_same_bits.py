"""A run on Flower has the bits of the run in process."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.config import make_config
from fedtailor.engines.flower.post import parcel_of
from fedtailor.flower.server import serve
from fedtailor.methods.registry import method_names
from fedtailor.run.interface import run_config
from flower.loopback import LoopbackGrid
from helpers import differing, final_weights, kind_of, slow_if

CONFIG = """
name = "same"
seed = 3
rounds = 3
clients_per_round = 3
evaluate_every = 1
[data]
dataset = "digits"
clients = 5
limit = 100
test_limit = 50
validation = 0
[model]
name = "cnn"
channels = [4, 6]
[fleet]
name = "uniform-2"
[method]
name = "{method}"
[training]
batch_size = 8
[engine]
workers = 0
"""

NETWORKS = Path(__file__).parents[1] / "odd_networks.py"


def config_of(method: str) -> str:
    """A run of a method, on a network that it can train."""
    text = CONFIG.replace("{method}", method)
    own = f'name = "{NETWORKS}:{kind_of(method)}"'
    return text if kind_of(method) == "plain" else text.replace('name = "cnn"\nchannels = [4, 6]', own)


FAST = "heterofl"
METHODS = [slow_if(name, *(other for other in method_names() if other != FAST)) for name in method_names()]


@pytest.mark.parametrize("method", METHODS)
def test_same_bits(method: str, tmp_path: Path) -> None:
    text = config_of(method)
    config = make_config(tomllib.loads(text))
    run_config(config, tmp_path / "here", on_notice=lambda _: None)
    nodes = {
        70 + node: {"partition-id": node, "num-partitions": 2, "state": str(tmp_path / f"state{node}")}
        for node in range(2)
    }
    handlers, before = set[object](), signal.getsignal(signal.SIGINT)
    run = serve(
        LoopbackGrid(text, nodes),
        config,
        tmp_path / "there",
        lambda _: handlers.add(signal.getsignal(signal.SIGINT)),
    )
    assert handlers == {before}  # Flower's own: it ends its apps at once when a SuperLink is gone
    assert run.state.round == 3
    assert not differing(final_weights(tmp_path / "here"), final_weights(tmp_path / "there"))


@pytest.mark.slow
def test_clients_are_asked_for_statistics_as_rarely_as_on_one_machine(tmp_path: Path) -> None:
    """Every question starts a process on the device: two rounds, then both widths once."""
    text = (
        CONFIG.replace("{method}", FAST)
        .replace("evaluate_every = 1\n", "")
        .replace("rounds = 3", "rounds = 2")
    )
    grid = LoopbackGrid(
        text, {70: {"partition-id": 0, "num-partitions": 1, "state": str(tmp_path / "state")}}
    )
    run = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run")
    asked = [parcel_of(message.content).head for message in grid.sent]
    actions = [head["tasks"][0]["action"] for head in asked if head["ask"] == "tasks"]
    assert actions == ["train", "train", "calibrate", "calibrate"]
    assert [bool(record.tiers) for record in run.history] == [False, True]
