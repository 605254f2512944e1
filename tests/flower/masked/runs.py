"""Small runs under masks, on Flower's messages and in process: what the tests of them share."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from flwr.app import Message
from torch import Tensor

from fedtailor.config import make_config
from fedtailor.engines.flower.post import parcel_of
from fedtailor.engines.in_process import InProcess
from fedtailor.flower.server import serve
from fedtailor.messages import Refused, Update
from fedtailor.run.setup import prepare_config
from fedtailor.server.loop import run_rounds
from flower.loopback import LoopbackGrid
from helpers import Spoiling, final_weights

CONFIG = """
name = "masked"
seed = 3
rounds = 2
clients_per_round = 6
evaluate_every = 2
[data]
dataset = "digits"
clients = 6
limit = 120
test_limit = 50
validation = 0
[model]
name = "mlp"
hidden = [8]
[fleet]
name = "uniform-2"
[method]
name = "heterofl"
label_rows = false
[training]
batch_size = 8
[engine]
workers = 0
wait = 5
[secure]
threshold = 2
"""
SHORT = CONFIG.replace("rounds = 2", "rounds = 1").replace("evaluate_every = 2", "evaluate_every = 1")
BAD, LOST = 0, (0, 3)  # a node, and the clients that it answers for: a third of six, one of each tier


def nodes(tmp_path: Path) -> dict[int, dict[str, Any]]:
    return {
        n: {"partition-id": n, "num-partitions": 3, "state": str(tmp_path / f"state{n}")} for n in range(3)
    }


def there(text: str, tmp_path: Path, grid: LoopbackGrid) -> dict[str, Tensor]:
    """The weights after the run on Flower."""
    serve(grid, make_config(tomllib.loads(text)), tmp_path / "there")
    return final_weights(tmp_path / "there")


def here(
    text: str, lost: tuple[int, ...] = (), since: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after the run in process, in which some clients are not heard any more since a round."""

    def silent(update: Update) -> Update | Refused:
        return update if update.round < since else Refused(update.client, update.round, "no-answer")

    setup = prepare_config(make_config(tomllib.loads(text)), lambda _: None).guarded(None, 0)
    engine: Any = InProcess(setup.method, setup.model, setup.data)
    for client in lost:
        engine = Spoiling(engine, client, silent)
    end = run_rounds(setup, engine, lambda _record, _at: None)
    return setup.start.state.weights, end.state.weights


def events(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "there" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "secure refused"]


def row(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "there" / "metrics.jsonl").read_text().splitlines()[-1])


class Watched(LoopbackGrid):
    """A grid that remembers what nodes answered."""

    def delivered(self, message: Message, node: int) -> Message:
        reply = super().delivered(message, node)
        self.heard = [*getattr(self, "heard", []), (node, parcel_of(reply.content))]
        return reply
