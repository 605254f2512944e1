"""The masked full module, worked out without tracing: the user's own class with zeros in dropped channels.

Which positions are dropped is read off ``groups.extents`` one by one. What a mask cannot express is done by hand: norms
over channels use the channels whose masked weight is not zero, and the scale of attention that of the kept head size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elasticity.odd_constructions import ChannelsFirstNorm
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import ChannelGroups


def masked_module(module: nn.Module, groups: ChannelGroups, cut: Cut, name: str) -> nn.Module:
    """A copy of ``module`` with everything into and out of dropped channels set to zero."""
    masked = copy.deepcopy(module)
    with torch.no_grad():
        for tensor_name, tensor in [*masked.named_parameters(), *masked.named_buffers()]:
            for dim, extent in enumerate(groups.extents[tensor_name]):
                for axis in extent.axes:
                    if axis.group in cut.channels:
                        kept = set(cut.channels[axis.group])
                        dropped = [unit for unit in range(groups.counts[axis.group]) if unit not in kept]
                        for unit in dropped:
                            tensor.index_fill_(dim, torch.from_numpy(axis.positions([unit])), 0)
        ADJUSTMENTS.get(name, lambda _module: None)(masked)
    return masked


def _rescale(weight: Tensor, *others: Tensor | None) -> None:
    """Queries of the kept head size: rows that are zero are dropped ones."""
    kept = int((weight.flatten(1) != 0).any(1).sum())
    for tensor in (weight, *others):
        if tensor is not None:
            tensor *= math.sqrt(len(weight) / kept)


def _cross(module: Any) -> None:
    """Attention that returns its weights does not use the fused function."""
    _rescale(module.attention.q_proj_weight, module.attention.in_proj_bias[:12])


def _vit(module: Any) -> None:
    _rescale(module.attention.qkv.weight[:12], module.attention.qkv.bias[:12])


def _gpt(module: Any) -> None:
    _rescale(module.c_attn.weight[:12], module.c_attn.bias[:12])


def _rotary(module: Any) -> None:
    kept = int((module.norm.weight != 0).sum())
    module.norm.weight *= (6 / kept) ** 0.25  # it scales queries and keys alike


def _spatial(module: Any) -> None:
    kept = int((module.conv1.weight.flatten(1) != 0).any(1).sum())
    module.map.weight[:, 0] *= 10 / kept  # the mean over the kept channels


ADJUSTMENTS: dict[str, Callable[[Any], None]] = {
    "CrossAttention": _cross,
    "ViT": _vit,
    "SmallGPT": _gpt,
    "RotaryEinsum": _rotary,
    "SpatialAttention": _spatial,
}


@contextmanager
def kept_statistics() -> Iterator[None]:
    """Norms over channels look at the kept channels only, and fused attention scales by the kept head size."""
    attention = F.scaled_dot_product_attention

    def scaled(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kept = int((query.flatten(0, -2) != 0).any(0).sum())
        return attention(query, *args, **{"scale": kept**-0.5, **kwargs})

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with (
        mock.patch.object(nn.LayerNorm, "forward", _layer_norm),
        mock.patch.object(nn.RMSNorm, "forward", _rms_norm),
        mock.patch.object(nn.GroupNorm, "forward", _group_norm),
        mock.patch.object(ChannelsFirstNorm, "forward", _channels_first),
        mock.patch.object(F, "scaled_dot_product_attention", scaled),
        mock.patch.object(F, "layer_norm", _layer_norm_function),
    ):
        yield
    torch.backends.mha.set_fastpath_enabled(fused)


def _moments(x: Tensor, keep: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    count = keep.expand(x.shape).sum(dims, keepdim=True).clamp(min=1)
    mean = (x * keep).sum(dims, keepdim=True) / count
    return mean, ((x - mean).square() * keep).sum(dims, keepdim=True) / count


def _layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    dims = list(range(-len(self.normalized_shape), 0))
    mean, variance = _moments(x, self.weight != 0, dims)
    out = (x - mean) / torch.sqrt(variance + self.eps) * self.weight
    return out if self.bias is None else out + self.bias


def _layer_norm_function(x: Tensor, _shape: Any, weight: Tensor) -> Tensor:
    mean, variance = _moments(x, weight != 0, [-1])
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight


def _rms_norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
    keep = self.weight != 0
    square = (x.square() * keep).sum(-1, keepdim=True) / keep.sum()
    return x / torch.sqrt(square + (self.eps or torch.finfo(x.dtype).eps)) * self.weight


def _group_norm(self: nn.GroupNorm, x: Tensor) -> Tensor:
    grouped = x.unflatten(1, (self.num_groups, -1))
    keep = (self.weight != 0).view(1, self.num_groups, -1, *(1,) * (x.dim() - 2))
    mean, variance = _moments(grouped, keep, list(range(2, grouped.dim())))
    normed = ((grouped - mean) / torch.sqrt(variance + self.eps)).reshape(x.shape)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return normed * self.weight.view(shape) + self.bias.view(shape)


def _channels_first(self: Any, x: Tensor) -> Tensor:
    mean, variance = _moments(x, (self.weight != 0)[:, None, None], [1])
    return self.weight[:, None, None] * ((x - mean) / torch.sqrt(variance + 1e-6)) + self.bias[:, None, None]
