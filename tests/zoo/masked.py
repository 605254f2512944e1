"""The masked full module, worked out without a trace: the library's own class, with zeros in dropped channels.

Which positions are dropped is read off ``groups.extents``. What a mask cannot express is done where the class calls it:
statistics over channels leave out channels that are zero everywhere, and fused attention is scaled by the kept head
size. Where a class writes such a thing out by hand the two differ, and the traced reference of ``check.py`` is what
the cut is compared with.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import ChannelGroups, Extent


def kept_positions(extent: Extent, groups: ChannelGroups, cut: Cut) -> Tensor:
    """Positions of an axis that a cut keeps, one unit after the other."""
    kept = torch.ones(extent.length, dtype=torch.bool)
    for axis in extent.axes:
        if axis.group in cut.channels:
            gone = sorted(set(range(groups.counts[axis.group])) - set(cut.channels[axis.group]))
            kept[torch.from_numpy(axis.positions(gone))] = False
    return kept.nonzero().flatten()


def masked_module(
    module: nn.Module, groups: ChannelGroups, cut: Cut, weights: dict[str, Tensor]
) -> nn.Module:
    """A copy of ``module`` with these weights, and zeros in everything into and out of dropped channels."""
    masked = copy.deepcopy(module).eval()
    with torch.no_grad():
        for name, tensor in [*masked.named_parameters(), *masked.named_buffers()]:
            tensor.copy_(weights.get(name, tensor))
            for dim, extent in enumerate(groups.extents[name]):
                gone = torch.ones(extent.length, dtype=torch.bool)
                gone[kept_positions(extent, groups, cut)] = False
                tensor.index_fill_(dim, gone.nonzero().flatten(), 0)
    return masked


class KeptChannels(TorchFunctionMode):
    """Functions that look across channels see the kept ones only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACED.get(getattr(func, "__name__", ""))
        return (
            func(*args, **(kwargs or {}))
            if replacement is None
            else replacement(func, *args, **(kwargs or {}))
        )


def _alive(x: Tensor, dim: int) -> Tensor:
    """Which positions of an axis hold anything, shaped for broadcasting."""
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    return (x != 0).sum(others, keepdim=True) > 0 if others else x != 0


def _moments(x: Tensor, keep: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    count = keep.expand(x.shape).sum(dims, keepdim=True).clamp(min=1)
    mean = (x * keep).sum(dims, keepdim=True) / count
    return mean, ((x - mean).square() * keep).sum(dims, keepdim=True) / count


def _layer_norm(
    _func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *_rest: Any,
) -> Tensor:  # fmt: skip
    keep = weight != 0 if weight is not None else _alive(x, -1)
    mean, variance = _moments(x, keep, list(range(-len(shape), 0)))
    out = (x - mean) / torch.sqrt(variance + eps) * (keep if weight is None else weight)
    return out if bias is None else out + bias


def _rms_norm(
    _func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    keep = weight != 0 if weight is not None else _alive(x, -1)
    dims = list(range(-len(shape), 0))
    square = (x.square() * keep).sum(dims, keepdim=True) / keep.expand(x.shape).sum(dims, keepdim=True).clamp(
        min=1
    )
    return x / torch.sqrt(square + (eps or torch.finfo(x.dtype).eps)) * (1 if weight is None else weight)


def _group_norm(
    _func: Any, x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *_rest: Any,
) -> Tensor:  # fmt: skip
    shape = (1, -1, *(1,) * (x.dim() - 2))
    keep = (weight != 0).view(shape) if weight is not None else _alive(x, 1)
    grouped, kept = x.unflatten(1, (num_groups, -1)), keep.expand(x.shape).unflatten(1, (num_groups, -1))
    mean, variance = _moments(grouped, kept, list(range(2, grouped.dim())))
    out = ((grouped - mean) / torch.sqrt(variance + eps)).reshape(x.shape)
    out = out * keep if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _attention(func: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("scale") is None:
        kwargs["scale"] = max(1, int(_alive(query, -1).sum())) ** -0.5
    out: Tensor = func(query, *args, **kwargs)
    return out


def _mean(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    dim = args[0] if args else kwargs.get("dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if not isinstance(dim, int) or bool(_alive(x, dim).all()):
        return func(x, *args, **kwargs)
    return func(x, *args, **kwargs) * (x.shape[dim] / max(1, int(_alive(x, dim).sum())))


def _softmax(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    dim = args[0] if args else kwargs.get("dim")
    if not isinstance(dim, int) or bool(_alive(x, dim).all()):
        return func(x, *args, **kwargs)
    return func(x.masked_fill(~_alive(x, dim), -torch.inf), *args, **kwargs).nan_to_num(0)


_REPLACED = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    F.scaled_dot_product_attention.__name__: _attention,
    "mean": _mean,
    "softmax": _softmax,
}
