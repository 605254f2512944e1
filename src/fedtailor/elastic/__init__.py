"""How a model is cut: from an unmodified ``nn.Module`` to pieces of any size, and back."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn

from fedtailor.client.losses import Objective
from fedtailor.data.batches import Batch, inputs_of
from fedtailor.elastic.check import check_trace
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.rules import TraceError, function_rule, layer_rule
from fedtailor.elastic.trace import trace
from fedtailor.errors import FedtailorError

__all__ = ["ElasticModel", "TraceError", "elastic", "function_rule", "layer_rule"]


def elastic(
    module: nn.Module, example: Batch, *, objective: Objective | None = None, on_unknown: str = "error"
) -> ElasticModel:
    """Trace an unmodified module so that it can be cut, and check the result numerically.

    ``example`` is a small batch as training will see it: a tuple with the target last, or a dict.
    ``on_unknown="keep"`` leaves channels that reach an operation without a rule uncut instead of refusing.
    """
    args, kwargs = inputs_of(example)
    groups = trace(module, args, kwargs, on_unknown)
    if not groups.elastic:
        reasons = "; ".join(f"{group}: {reason}" for group, reason in groups.fixed.items())
        raise FedtailorError(f"nothing in {type(module).__name__} can shrink ({reasons or 'it has no channels'})")
    model = ElasticModel(module, groups, example, objective)
    check_trace(model)
    return model


class _CallablePackage(ModuleType):
    """Lets ``fedtailor.elastic`` be both the package and the function of the same name, as users write it."""

    def __call__(self, *args: Any, **kwargs: Any) -> ElasticModel:
        return elastic(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
