"""How channels pass through space: pooling, padding, resizing, and pixels that become channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.elasticity.tracing.rulebook.functions import names, variants
from fedtailor.elasticity.tracing.rules import Site, function_rule, layer_rule
from fedtailor.elasticity.tracing.units import Numbers

KINDS = names(
    "MaxPool AvgPool AdaptiveAvgPool AdaptiveMaxPool LPPool FractionalMaxPool MaxUnpool ZeroPad ConstantPad "
    "ReflectionPad ReplicationPad CircularPad"
)
FUNCTIONS = ("max", "avg", "adaptive_avg", "adaptive_max", "lp", "fractional_max")
RESIZING = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")


def spatial(site: Site, axes: int) -> Any:
    """The last ``axes`` axes are pooled or resized; the channels before them pass through."""
    x = site.operand()
    for other in site.operands():
        site.fix_axes(other, range(other.value.dim() - axes, other.value.dim()), "is pooled by")
    numbers = (*x.numbers[: x.value.dim() - axes], *(None,) * axes)
    if isinstance(site.output, Tensor):
        return numbers
    return (numbers,) * len(site.output)  # the maxima and their positions


def _spatial_rule(axes: int | None) -> Callable[[Site], Any]:
    return lambda site: spatial(site, site.operand().value.dim() - 2 if axes is None else axes)


for _axes in (1, 2, 3):
    _layers = [getattr(nn, f"{kind}{_axes}d", None) for kind in KINDS]
    layer_rule(*(layer for layer in _layers if layer is not None))(_spatial_rule(_axes))
    _names = [f"{kind}_pool{_axes}d" for kind in FUNCTIONS]
    _names += [*(f"{name}_with_indices" for name in _names), f"max_unpool{_axes}d"]
    function_rule(*variants(*_names))(_spatial_rule(_axes))
layer_rule(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)(_spatial_rule(None))
function_rule(F.interpolate, F.upsample, F.grid_sample)(_spatial_rule(None))
function_rule(*(f"aten::upsample_{kind}" for kind in RESIZING))(_spatial_rule(None))


@layer_rule(nn.PixelShuffle, nn.PixelUnshuffle)
@function_rule(*variants("pixel_shuffle", "pixel_unshuffle"))
def pixel_shuffle(site: Site) -> Numbers:
    """Blocks of channels become pixels, or pixels become blocks of channels."""
    x = site.operand()
    site.fix_axes(x, (-1, -2), "is space for")
    numbers, ratio = x.numbers[-3], x.shape[-3] / site.output.shape[-3]
    if numbers is not None and ratio >= 1:
        blocks = numbers.reshape(site.output.shape[-3], -1)
        site.units.tie(blocks[:, :1], blocks)
        numbers = np.ascontiguousarray(blocks[:, 0])
    elif numbers is not None:
        numbers = np.repeat(numbers, round(1 / ratio))
    return (*x.numbers[:-3], numbers, None, None)


@layer_rule(nn.Unfold)
@function_rule(F.unfold, "aten::im2col")
def unfold(site: Site) -> Numbers:
    """Every channel becomes as many consecutive features as the kernel has positions."""
    x = site.operand()
    site.fix_axes(x, (-1, -2), "is space for")
    numbers = x.numbers[-3]
    spread = None if numbers is None else np.repeat(numbers, site.output.shape[-2] // len(numbers))
    return (*x.numbers[:-3], spread, None)


@layer_rule(nn.Fold)
@function_rule(F.fold, "aten::col2im")
def fold(site: Site) -> Numbers:
    """The way back: every channel is as many consecutive features as the kernel has positions."""
    x = site.operand()
    site.fix_axes(x, (-1,), "is space for")
    numbers = x.numbers[-2]
    if numbers is not None:
        blocks = numbers.reshape(site.output.shape[-3], -1)
        site.units.tie(blocks[:, :1], blocks)
        numbers = np.ascontiguousarray(blocks[:, 0])
    return (*x.numbers[:-2], numbers, None, None)
