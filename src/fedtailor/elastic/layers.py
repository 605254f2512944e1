"""How each layer type carries channels: one rule per type, registered in the table of ``trace.py``.

A rule names the tensor axes that the channels lie on (``units.drive``), the size attributes that follow them
(``units.follow``), and returns the units along each axis of the layer's output.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedtailor.elastic.groups import Indices
from fedtailor.elastic.rules import Operand, Site, layer_rule
from fedtailor.elastic.units import Labels

ELEMENTWISE_LAYERS = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardtanh,
    nn.Hardsigmoid, nn.Hardswish, nn.Threshold,
)    # fmt: skip
SPATIAL_LAYERS = {
    1: (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.LPPool1d),
    2: (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.LPPool2d, nn.ZeroPad2d),
    3: (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}


@layer_rule(*ELEMENTWISE_LAYERS)
def elementwise(site: Site) -> Labels:
    """Every position by itself."""
    return operand(site).labels


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(site: Site) -> Labels:
    """Weight (out, in / groups, ...): rows are the output channels, columns the input channels."""
    layer, x, units = site.layer, operand(site), site.units
    channel = x.value.dim() - len(layer.kernel_size) - 1    # type: ignore[union-attr, arg-type]
    inputs, outputs, columns = _grouped(site, x.labels[channel])
    units.drive(site.tensor("weight"), 0, outputs)
    if columns is not None:
        units.drive(site.tensor("weight"), 1, columns)
    return _finish_convolution(site, x, channel, inputs, outputs)


@layer_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed_convolution(site: Site) -> Labels:
    """Weight (in, out / groups, ...): rows are the input channels."""
    layer, x, units = site.layer, operand(site), site.units
    channel = x.value.dim() - len(layer.kernel_size) - 1    # type: ignore[union-attr, arg-type]
    inputs, outputs, _ = _grouped(site, x.labels[channel])
    per_group = len(outputs) // layer.groups    # type: ignore[union-attr, operator]
    if inputs is not None:
        units.drive(site.tensor("weight"), 0, inputs)
    if not _whole_groups(site):
        units.drive(site.tensor("weight"), 1, outputs[:per_group])
    return _finish_convolution(site, x, channel, inputs, outputs)


def _whole_groups(site: Site) -> bool:
    """Whether a grouped convolution shrinks by dropping whole groups (the finer choice) or inside each group."""
    layer: Any = site.layer
    return bool(layer.groups > 1 and layer.groups >= layer.in_channels // layer.groups)


def _grouped(site: Site, inputs: Indices | None) -> tuple[Indices | None, Indices, Indices | None]:
    """Input channels, output channels and the columns of one group, tied so that every cut keeps equal groups."""
    layer: Any = site.layer
    groups, units = layer.groups, site.units
    outputs = units.fresh(layer.out_channels)
    if groups == 1:
        return inputs, outputs, inputs
    if inputs is None:
        units.fix(outputs, f"{site.place}: a grouped convolution of the module's input")
        return None, outputs, None
    by_group_in, by_group_out = inputs.reshape(groups, -1), outputs.reshape(groups, -1)
    if _whole_groups(site):    # depthwise: a group is one channel
        units.tie(by_group_in[:, :1], by_group_in)
        units.tie(by_group_in[:, :1], by_group_out)
        units.follow(site.path, "groups", by_group_in[:, 0])
        return inputs, outputs, None
    units.tie(by_group_in[:1], by_group_in)
    units.tie(by_group_out[:1], by_group_out)
    return inputs, outputs, by_group_in[0]


def _finish_convolution(site: Site, x: Operand, channel: int, inputs: Indices | None, outputs: Indices) -> Labels:
    units, layer = site.units, site.layer
    if layer.bias is not None:    # type: ignore[union-attr]
        units.drive(site.tensor("bias"), 0, outputs)
    units.follow(site.path, "out_channels", outputs)
    if inputs is not None:
        units.follow(site.path, "in_channels", inputs)
    units.producers[site.path] = outputs
    fix_axes(site, x, range(channel + 1, x.value.dim()), "is a spatial axis of")
    return (*x.labels[:channel], outputs, *(None,) * (x.value.dim() - channel - 1))


@layer_rule(nn.Linear)
def linear(site: Site) -> Labels:
    """Weight (out, in), on the last axis of the input."""
    x, units = operand(site), site.units
    outputs = units.fresh(site.layer.out_features)    # type: ignore[union-attr, arg-type]
    units.drive(site.tensor("weight"), 0, outputs)
    units.follow(site.path, "out_features", outputs)
    if site.layer.bias is not None:    # type: ignore[union-attr]
        units.drive(site.tensor("bias"), 0, outputs)
    if x.labels[-1] is not None:
        units.drive(site.tensor("weight"), 1, x.labels[-1])
        units.follow(site.path, "in_features", x.labels[-1])
    units.producers[site.path] = outputs
    return (*x.labels[:-1], outputs)


@layer_rule(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)    # fmt: skip
def channel_norm(site: Site) -> Labels:
    """Statistics per channel: affine parameters and running statistics follow the channels."""
    x = operand(site)
    channels = x.labels[1]
    if channels is not None:
        _drive_vectors(site, channels, "weight", "bias", "running_mean", "running_var")
        site.units.follow(site.path, "num_features", channels)
    return x.labels


@layer_rule(nn.GroupNorm)
def group_norm(site: Site) -> Labels:
    """Statistics per group of channels: whole groups are dropped, or every group shrinks, whichever is finer."""
    layer: Any = site.layer
    x, units = operand(site), site.units
    channels = x.labels[1]
    fix_axes(site, x, range(2, x.value.dim()), "is averaged by")
    if channels is None:
        return x.labels
    by_group = channels.reshape(layer.num_groups, -1)
    if layer.num_groups >= by_group.shape[1]:
        units.tie(by_group[:, :1], by_group)
        units.follow(site.path, "num_groups", by_group[:, 0])
    else:
        units.tie(by_group[:1], by_group)
    _drive_vectors(site, channels, "weight", "bias")
    units.follow(site.path, "num_channels", channels)
    return x.labels


@layer_rule(nn.LayerNorm, nn.RMSNorm)
def last_axes_norm(site: Site) -> Labels:
    """Statistics over the last axes: of the kept channels, where they were cut."""
    layer: Any = site.layer
    x = operand(site)
    first = x.value.dim() - len(layer.normalized_shape)
    for index, labels in enumerate(x.labels[first:]):
        if labels is None:
            continue
        for name in ("weight", "bias"):
            if getattr(layer, name, None) is not None:
                site.units.drive(site.tensor(name), index, labels)
        site.units.follow(site.path, "normalized_shape", labels, index)
    return x.labels


@layer_rule(nn.PReLU)
def prelu(site: Site) -> Labels:
    """One slope for all channels, or one each."""
    x = operand(site)
    if site.layer.num_parameters > 1 and x.labels[1] is not None:    # type: ignore[union-attr, operator]
        _drive_vectors(site, x.labels[1], "weight")
        site.units.follow(site.path, "num_parameters", x.labels[1])
    return x.labels


@layer_rule(nn.Embedding)
def embedding(site: Site) -> Labels:
    """Weight (vocabulary, channels): only the columns may shrink."""
    layer: Any = site.layer
    columns = site.units.fresh(layer.embedding_dim)
    site.units.drive(site.tensor("weight"), 1, columns)
    site.units.follow(site.path, "embedding_dim", columns)
    site.units.producers[site.path] = columns
    return (*(None,) * (site.output.dim() - 1), columns)


@layer_rule(nn.Softmax, nn.LogSoftmax)
def softmax(site: Site) -> Labels:
    """Mixes one axis, which must stay whole."""
    x = operand(site)
    dim = site.layer.dim    # type: ignore[union-attr]
    fix_axes(site, x, [int(dim) % x.value.dim()] if dim is not None else range(x.value.dim()), "is mixed by")    # type: ignore[arg-type]
    return x.labels


@layer_rule(nn.Upsample)
def upsample(site: Site) -> Labels:
    """Only spatial axes change."""
    return spatial(site, operand(site).value.dim() - 2)


def _spatial_rule(axes: int) -> Any:
    def rule(site: Site) -> Labels:
        return spatial(site, axes)

    return rule


for _axes, _types in SPATIAL_LAYERS.items():
    layer_rule(*_types)(_spatial_rule(_axes))


def spatial(site: Site, axes: int) -> Labels:
    """The last ``axes`` axes are pooled or resized; the channels before them pass through."""
    x = operand(site)
    fix_axes(site, x, range(x.value.dim() - axes, x.value.dim()), "is pooled by")
    return (*x.labels[:-axes], *(None,) * axes) if axes else x.labels


def operand(site: Site) -> Operand:
    """The first tensor that flows in."""
    return site.operands()[0]


def fix_axes(site: Site, x: Operand, dims: Any, what: str) -> None:
    """Channels on these axes cannot shrink; ``what`` says why."""
    for dim in dims:
        site.units.fix(x.labels[dim], f"{what} {site.place}")


def _drive_vectors(site: Site, channels: Indices, *names: str) -> None:
    for name in names:
        if getattr(site.layer, name, None) is not None:
            site.units.drive(site.tensor(name), 0, channels)
