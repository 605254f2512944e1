"""The same rounds by pfl, in one process with all cores' threads.

python benchmarks/rounds/peers/pfl_rounds.py W1
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from turns import Turns
from workloads import RATE, WORKLOADS

WARM = 2
FOREVER = 1_000_000


class WithLoss(nn.Module):
    """A network as pfl wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.network(x)
        return answer

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        return {}


class Between(TrainingProcessCallback):  # type: ignore[misc]
    """Called after every round."""

    def __init__(self) -> None:
        self.turns, self.rounds = Turns(), 0

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.rounds += 1
        if self.rounds > WARM:
            self.turns.done()
        stop = self.rounds >= WARM and not self.turns.wait()
        return stop, Metrics()


def main() -> None:
    """A round at a time."""
    workload = WORKLOADS[sys.argv[1]]
    columns = workload.data()
    torch.manual_seed(0)
    network = WithLoss(workload.build(1.0))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))

    def dataset(user: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset(tensors=tuple(workload.part(columns, user)), user_id=str(user))

    users = FederatedDataset(dataset, get_user_sampler("random", list(range(workload.clients))))
    np.random.seed(0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=FOREVER, evaluation_frequency=FOREVER, train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=workload.batch),
        NNEvalHyperParams(local_batch_size=workload.batch),
        callbacks=[Between()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
