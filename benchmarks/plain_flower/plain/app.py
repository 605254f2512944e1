"""FedAvg as Flower has it: each node trains those of its clients that a round names, and sends their mean."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, EXAMPLES, BATCH, RATE = 100, 600, 32, 0.1
server = ServerApp()
client = ClientApp()


def network() -> nn.Module:
    """Two 5x5 convolutions of 16 and 32 channels with pools, a layer of 128."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's own strategy, all nodes in every round, no evaluation on nodes."""
    rounds = len(json.loads(str(context.run_config["cohorts"])))

    def tell(number: int, _arrays: ArrayRecord) -> None:
        print(f"round {number} at {time.time():.3f}", flush=True)

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
    strategy.start(grid, ArrayRecord(network().state_dict()), rounds, evaluate_fn=tell)


@client.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of SGD for each client of this node that the round names."""
    torch.set_num_threads(1)
    part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    number = int(str(message.content.config_records["config"]["server-round"]))
    cohort = json.loads(str(context.run_config["cohorts"]))[number - 1]
    mine = [each for each in cohort if each % parts == part]
    images, labels = read(Path(str(context.run_config["images"])))
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    start, model = message.content.array_records["arrays"].to_torch_state_dict(), network()
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    for each in mine:
        model.load_state_dict(start)
        epoch(model, images, labels, shuffled[each * EXAMPLES : (each + 1) * EXAMPLES])
        for name, value in model.state_dict().items():
            total[name] += value / len(mine)
    content = RecordDict(
        {
            "arrays": ArrayRecord(total),
            "metrics": MetricRecord({"num-examples": max(1, len(mine) * EXAMPLES)}),
        }
    )
    return Message(content, reply_to=message)


def epoch(model: nn.Module, images: Tensor, labels: Tensor, rows: Tensor) -> None:
    """Through a client's examples once."""
    optimiser = torch.optim.SGD(model.parameters(), RATE)
    for batch in rows[torch.randperm(len(rows))].split(BATCH):
        optimiser.zero_grad()
        inputs = images[batch].float().div(255).sub(0.2860).div(0.3530)
        F.cross_entropy(model(inputs), labels[batch]).backward()
        optimiser.step()


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """The training images (60000, 1, 28, 28) and their labels."""
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8, offset=16)
    return pixels.view(-1, 1, 28, 28), torch.frombuffer(bytearray(labels), dtype=torch.uint8, offset=8).long()
