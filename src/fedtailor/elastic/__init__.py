"""How a model is cut: from an unmodified ``nn.Module`` to pieces of any size, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from fedtailor.client.losses import Objective
from fedtailor.data.batches import Batch
from fedtailor.elastic.candidates import Wishes, choose
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.rules import Operand, Site, TraceError, function_rule, layer_rule

__all__ = ["ElasticModel", "Operand", "Site", "TraceError", "elastic", "function_rule", "layer_rule"]


def elastic(
    module: nn.Module,
    example: Batch,
    *,
    objective: Objective | None = None,
    on_unknown: str = "error",
    keep: Sequence[str] = (),
    tie: Sequence[tuple[str, str]] = (),
    minimum: int | Mapping[str, int] = 1,
    multiple: int | Mapping[str, int] = 1,
) -> ElasticModel:
    """Trace an unmodified module so that it can be cut, and check the result numerically.

    ``example`` is a small batch as training will see it: a tuple with the target last, or a dict. The module itself is
    never touched.

    ``keep`` names layers whose output channels stay (``"head"``: all layers below it too; ``"block*"``: a pattern)
    and tensors that stay whole, ``tie`` pairs of layers whose output channels shrink together. ``minimum`` and
    ``multiple`` say how many channels a cut must keep at least, and in multiples of what: one number for all groups,
    or one for each layer named. ``on_unknown="keep"`` leaves channels that reach an operation without a rule uncut
    instead of refusing.
    """
    return choose(module, example, objective, Wishes(on_unknown, keep, tie, minimum, multiple))


class _CallablePackage(ModuleType):
    """Lets ``fedtailor.elastic`` be both the package and the function of the same name, as users write it."""

    def __call__(self, *args: Any, **kwargs: Any) -> ElasticModel:
        return elastic(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
