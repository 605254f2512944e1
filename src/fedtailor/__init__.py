"""fedtailor: resource-adaptive federated learning. One global model, cut to fit every device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtailor.client.local_training import LocalTraining as LocalTraining
    from fedtailor.data.federated import FederatedData as FederatedData
    from fedtailor.elasticity.adapters import as_peft as as_peft
    from fedtailor.elasticity.costing.budget import Budget as Budget
    from fedtailor.elasticity.front_door import elastic as elastic
    from fedtailor.elasticity.tracing.rules import function_rule as function_rule
    from fedtailor.elasticity.tracing.rules import layer_rule as layer_rule
    from fedtailor.errors import FedtailorError as FedtailorError
    from fedtailor.fleet import Fleet as Fleet
    from fedtailor.merging.robust.settings import MergeSettings as MergeSettings
    from fedtailor.merging.settings import ServerSettings as ServerSettings
    from fedtailor.method import Method as Method
    from fedtailor.methods.registry import register as register
    from fedtailor.objective import Objective as Objective
    from fedtailor.run.interface import resume as resume
    from fedtailor.run.interface import train as train
    from fedtailor.run.result import Run as Run
    from fedtailor.sweep.interface import compare as compare

__version__ = "0.1.0"

# Where each public name lives. Names are imported when they are first used: ``fedtailor --help`` needs no PyTorch.
_HOMES = {
    "Budget": "fedtailor.elasticity.costing.budget",
    "FederatedData": "fedtailor.data.federated",
    "FedtailorError": "fedtailor.errors",
    "Fleet": "fedtailor.fleet",
    "LocalTraining": "fedtailor.client.local_training",
    "MergeSettings": "fedtailor.merging.robust.settings",
    "Method": "fedtailor.method",
    "Objective": "fedtailor.objective",
    "Run": "fedtailor.run.result",
    "ServerSettings": "fedtailor.merging.settings",
    "as_peft": "fedtailor.elasticity.adapters",
    "compare": "fedtailor.sweep.interface",
    "elastic": "fedtailor.elasticity.front_door",
    "function_rule": "fedtailor.elasticity.tracing.rules",
    "layer_rule": "fedtailor.elasticity.tracing.rules",
    "register": "fedtailor.methods.registry",
    "resume": "fedtailor.run.interface",
    "train": "fedtailor.run.interface",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names, and methods by the name of their class: ``fedtailor.HeteroFL``."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    known = ""
    if name[:1].isupper():
        classes = importlib.import_module("fedtailor.methods.registry").method_classes()
        if name in classes:
            return classes[name]
        known = f"; methods: {', '.join(sorted(classes))}"
    raise AttributeError(f"module 'fedtailor' has no attribute {name!r}{known}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
