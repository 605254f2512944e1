"""How normalisation carries channels: per channel, per group of channels, or over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, layer_rule
from fedtailor.elasticity.tracing.units import Numbers


@layer_rule(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
def channel_norm_layer(site: Site) -> Numbers:
    """Statistics per channel: affine parameters and running statistics follow the channels."""
    x = site.operand()
    unbatched = (
        isinstance(site.layer, nn.modules.instancenorm._InstanceNorm)
        and x.value.dim() == site.layer._get_no_batch_dim()
    )
    channels = x.numbers[0 if unbatched else 1]
    for name in ("weight", "bias", "running_mean", "running_var"):
        vector = site.parameter(name, channels)
        if vector is not None:
            site.join(vector.numbers[0], channels, "normalises what cannot shrink in")
    site.follow("num_features", channels)
    return x.numbers


@function_rule(F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
def channel_norm_function(site: Site) -> Numbers:
    """As the layer: every other tensor is a vector over the channels.

    Weights that are standardised (``weight.reshape(1, rows, -1)``) have their columns on a further axis.
    """
    x, *vectors = site.operands()
    for vector in vectors:
        site.join(vector.numbers[0], x.numbers[1], "normalises what cannot shrink in")
    if any(numbers is not None for numbers in (x.numbers[0], *x.numbers[2:])):
        site.mark("small")
    site.follow("num_features", x.numbers[1])
    return x.numbers


@layer_rule(nn.GroupNorm)
def group_norm_layer(site: Site) -> Numbers:
    """Statistics per group of channels."""
    x = site.operand()
    vectors = [site.parameter(name, x.numbers[1]) for name in ("weight", "bias")]
    return _group_norm(site, x, site.layer.num_groups, [vector for vector in vectors if vector is not None])


@function_rule(F.group_norm, torch.group_norm)
def group_norm_function(site: Site) -> Numbers:
    """As the layer."""
    x, *vectors = site.operands()
    return _group_norm(site, x, site.argument(1, "num_groups"), vectors)


def _group_norm(site: Site, x: Operand, groups: int, vectors: Sequence[Operand]) -> Numbers:
    """Whole groups are dropped, or every group shrinks, whichever is finer."""
    channels = x.numbers[1]
    site.fix_axes(x, range(2, x.value.dim()), "is averaged by")
    for vector in vectors:
        site.join(vector.numbers[0], channels, "normalises what cannot shrink in")
    if channels is None:
        return x.numbers
    site.mark("small")
    by_group = channels.reshape(groups, -1)
    if groups >= by_group.shape[1]:
        site.units.tie(by_group[:, :1], by_group)
        site.follow("num_groups", by_group[:, 0])
        if site.node.op == "call_function":
            site.sized(site.written(1, "num_groups")[1], by_group[:, 0])
    else:
        site.units.tie(by_group[:1], by_group)
    site.follow("num_channels", channels)
    return x.numbers


@layer_rule(nn.LayerNorm, nn.RMSNorm)
def last_axes_norm_layer(site: Site) -> Numbers:
    """Statistics over the last axes: of the kept channels, where they were cut."""
    x = site.operand()
    held = x.numbers[x.value.dim() - len(site.layer.normalized_shape) :]
    vectors = [site.parameter(name, *held) for name in ("weight", "bias")]
    return _last_axes_norm(site, x, len(held), [vector for vector in vectors if vector is not None])


@function_rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def last_axes_norm_function(site: Site) -> Numbers:
    """As the layer; the sizes of the last axes are an argument."""
    x, *vectors = site.operands()
    count = len(site.argument(1, "normalized_shape"))
    written, path = site.written(1, "normalized_shape")
    if isinstance(written, tuple | list):
        for index, numbers in enumerate(x.numbers[x.value.dim() - count :]):
            site.sized((*path, index), numbers)
    return _last_axes_norm(site, x, count, vectors)


def _last_axes_norm(site: Site, x: Operand, count: int, vectors: Sequence[Operand]) -> Numbers:
    held = x.numbers[x.value.dim() - count :]
    for vector in vectors:
        for dim, numbers in enumerate(vector.numbers):
            site.join(numbers, held[dim], "normalises what cannot shrink in")
    for index, numbers in enumerate(held):
        site.follow("normalized_shape", numbers, index)
    if any(numbers is not None for numbers in held):
        site.mark("small")
    return x.numbers


@function_rule(torch._weight_norm, "aten::_weight_norm")
def weight_norm(site: Site) -> Numbers:
    """A direction times a length for every position of one axis; of the kept channels."""
    direction, length = site.operands()
    dim = direction.dim(site.argument(2, "dim", 0))
    site.join(direction.numbers[dim], length.numbers[dim], "has a length that cannot shrink in")
    return over_axes(site, [other for other in range(direction.value.dim()) if other != dim])


@function_rule(F.normalize)
def unit_length(site: Site) -> Numbers:
    """Divided by the length over an axis: of the kept channels."""
    return over_axes(site, [site.argument(2, "dim", 1)])


@function_rule(F.cosine_similarity, torch.cosine_similarity)
def cosine(site: Site) -> Numbers:
    """The angle between two activations, over the kept channels."""
    a, b = site.operands()
    dim = a.dim(site.argument(2, "dim", 1))
    site.join(a.numbers[dim], b.numbers[dim], "is compared with what cannot shrink in")
    site.mark("small")
    return tuple(numbers for d, numbers in enumerate(a.numbers) if d != dim)


def over_axes(site: Site, dims: Sequence[int]) -> Numbers:
    """The output has the input's axes; statistics are over the kept channels."""
    x = site.operand()
    if any(x.numbers[dim] is not None for dim in dims):
        site.mark("small")
    return x.numbers


@layer_rule(nn.LocalResponseNorm, nn.CrossMapLRN2d)
@function_rule(F.local_response_norm)
def neighbours(site: Site) -> Any:
    """Each channel looks at its neighbours, and a cut changes who they are."""
    x = site.operand()
    site.fix_axes(x, (1,), "is compared with its neighbours by")
    return x.numbers
