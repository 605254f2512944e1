"""The same rounds by Flower's simulation, on Ray, with one core for each of two clients at a time.

python benchmarks/rounds/peers/flower_rounds.py W1
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy
from turns import Turns
from workloads import RATE, WORKLOADS

WARM = 2
FOREVER = 1_000_000
NAME = sys.argv[1] if __name__ == "__main__" else os.environ["ROUNDS_WORKLOAD"]
os.environ["ROUNDS_WORKLOAD"] = NAME
WORKLOAD = WORKLOADS[NAME]

client, server = ClientApp(), ServerApp()
_columns: list[Any] = []


@client.train()
def train(message: Message, context: Context) -> Message:
    """One client of the cohort."""
    torch.set_num_threads(1)
    if not _columns:  # once in every process
        _columns.extend(WORKLOAD.data())
    part = WORKLOAD.part(_columns, int(context.node_config["partition-id"]))
    network = WORKLOAD.build(1.0)
    sent = message.content["arrays"]
    assert isinstance(sent, ArrayRecord)
    network.load_state_dict(sent.to_torch_state_dict())
    optimiser = torch.optim.SGD(network.parameters(), lr=RATE)
    for rows in torch.randperm(WORKLOAD.examples).split(WORKLOAD.batch):
        inputs, labels = (column[rows] for column in part)
        optimiser.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": WORKLOAD.examples})
    arrays = ArrayRecord(network.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def rounds(grid: Grid, context: Context) -> None:
    """FedAvg, stopped after every round."""
    turns = Turns()

    def between(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number > WARM:
            turns.done()
        if number >= WARM and not turns.wait():
            ray.shutdown()
            os._exit(0)
        return MetricRecord()

    share = WORKLOAD.cohort / WORKLOAD.clients
    strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=WORKLOAD.clients)
    torch.manual_seed(0)
    strategy.start(
        grid, ArrayRecord(WORKLOAD.build(1.0).state_dict()), num_rounds=FOREVER, train_config=ConfigRecord(),
        evaluate_fn=between,
    )  # fmt: skip


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=WORKLOAD.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
