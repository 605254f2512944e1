"""A user's module before it is traced: the names of its tensors, and copies of it, on which all the work happens.

``trace.py`` hands such copies to ``recorder.py`` and ``exported.py``; cutting and running use them too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedtailor.elasticity.tracing.rules import TraceError, rule_of_layer

M = TypeVar("M", bound=nn.Module)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared tensors once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shared_names(module: nn.Module) -> dict[str, str]:
    """Second and later names of shared tensors, each with the first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    both = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied


def weightless(module: M) -> M:
    """A copy of the module with all parameters and buffers on ``meta``: its structure without its memory."""
    return _copy(module, lambda value: torch.empty_like(value, device="meta", requires_grad=False))


def recordable(module: M, training: bool) -> M:
    """A copy of the module to record, without gradients.

    Hooks of the user's own modules are gone: recording would hand them what is not a tensor. Hooks of layers stay.
    """
    duplicate = in_mode(_copy(module, lambda value: value.detach().clone()), training)
    for part in duplicate.modules():
        if rule_of_layer(type(part)) is None:
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        _without_cache(getattr(part, "config", None))
    return duplicate


def _without_cache(configuration: Any) -> None:
    """Keys and values of earlier tokens that a language model keeps beside its answer are no part of the answer."""
    if getattr(configuration, "use_cache", None) is True:
        configuration.use_cache = False


def hooked(module: nn.Module) -> list[str]:
    """The parts of the user's own that have hooks, which are not recorded."""
    parts = [(name, part) for name, part in module.named_modules() if rule_of_layer(type(part)) is None]
    return [
        name or "the module itself" for name, part in parts if part._forward_hooks or part._forward_pre_hooks
    ]


def in_mode(module: M, training: bool) -> M:
    """Set the mode of the user's own modules; PyTorch's layers stay in evaluation (norms refuse a batch of one)."""
    module.eval()
    for part in module.modules():
        part.training = training and rule_of_layer(type(part)) is None
    return module


def refuse_unfinished(module: nn.Module) -> None:
    """Layers that are built when they first see data have no sizes yet."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(value):
            raise TraceError(
                f"{name} is built lazily and has no size yet: call the module once on the example batch, then trace it"
            )


def _copy(module: M, tensor: Callable[[Tensor], Tensor]) -> M:
    """A deep copy whose tensors are made by ``tensor``; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    for value in [*module.parameters(), *module.buffers()]:
        made = tensor(value)
        memo[id(value)] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
    for part in module.modules():
        for value in vars(part).values():  # an activation that forward left behind
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise TraceError(f"{type(module).__name__} cannot be copied with copy.deepcopy: {error}") from error
