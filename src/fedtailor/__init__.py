"""fedtailor: resource-adaptive federated learning. One global model, cut to fit every device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtailor.client.losses import Objective as Objective
    from fedtailor.client.sgd import LocalTraining as LocalTraining
    from fedtailor.data.federated import FederatedData as FederatedData
    from fedtailor.elastic import elastic as elastic
    from fedtailor.elastic.budget import Budget as Budget
    from fedtailor.errors import FedtailorError as FedtailorError
    from fedtailor.fleet import Fleet as Fleet
    from fedtailor.method import Method as Method
    from fedtailor.methods import register as register
    from fedtailor.run import Run as Run
    from fedtailor.run import resume as resume
    from fedtailor.run import train as train

__version__ = "0.1.0"

# Where each public name lives. Names are imported when they are first used: ``fedtailor --help`` needs no PyTorch.
_HOMES = {
    "Budget": "fedtailor.elastic.budget",
    "FederatedData": "fedtailor.data.federated",
    "FedtailorError": "fedtailor.errors",
    "Fleet": "fedtailor.fleet",
    "LocalTraining": "fedtailor.client.sgd",
    "Method": "fedtailor.method",
    "Objective": "fedtailor.client.losses",
    "Run": "fedtailor.run",
    "elastic": "fedtailor.elastic",
    "register": "fedtailor.methods",
    "resume": "fedtailor.run",
    "train": "fedtailor.run",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedtailor' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
