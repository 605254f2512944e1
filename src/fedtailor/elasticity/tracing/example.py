"""The example batch as tracing needs it: by the names of ``forward``, as a copy, without memory.

``recorder.py`` and ``exported.py`` run a module on it; ``reference.py`` takes other batches apart in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fedtailor.elasticity.tracing.rules import TraceError


def inputs_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The example's inputs by the names of ``forward``; extra ones under ``*args`` and ``**kwargs``."""
    signature = inspect.signature(type(module).forward)
    try:
        bound = signature.bind(module, *args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(module).__name__}.forward does not take the example batch: {error}"
        ) from None
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = {name: stars.get(parameter.kind, "") + name for name, parameter in signature.parameters.items()}
    own = next(iter(signature.parameters))
    return {names[name]: value for name, value in bound.arguments.items() if name != own}


def on_meta(value: Any) -> Any:
    """The value with every tensor in it replaced by one of the same shape without memory; sequences as tuples."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: on_meta(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return tuple(on_meta(entry) for entry in value)
    return value


def copied(inputs: Any) -> Any:
    """The inputs with tensors of their own: a module may write into what it is given."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
