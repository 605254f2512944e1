"""How layers with weights carry channels: convolutions, linear layers, embeddings, as layers and as functions.

A rule names the tensor axes that the channels lie on, the sizes that follow them (attributes of the layer, or arguments
of the call), and returns the units along each axis of the output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, layer_rule
from fedtailor.elasticity.tracing.units import Numbers

GROUPS = 6  # position of ``groups`` among the arguments of every functional convolution


@layer_rule(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
def linear_layer(site: Site) -> Numbers:
    """Weight (out, in), on the last axis of the input."""
    x = site.operand()
    weight = site.parameter("weight", None, x.numbers[-1])
    assert weight is not None
    return _linear(site, x, weight, site.parameter("bias", weight.numbers[0]))


@function_rule(F.linear)
def linear_function(site: Site) -> Numbers:
    """As the layer, on any tensors."""
    return _linear(site, site.argument(0, "input"), site.argument(1, "weight"), site.argument(2, "bias"))


def _linear(site: Site, x: Operand, weight: Operand, bias: Operand | None) -> Numbers:
    rows = weight.numbers[0] if weight.value.dim() == 2 else None
    site.join(weight.numbers[-1], x.numbers[-1], site.reading)
    if bias is not None:
        site.join(bias.numbers[0], rows, "is added to what cannot shrink in")
    site.follow("out_features", rows)
    site.follow("in_features", x.numbers[-1])
    site.produce(rows)
    return (*x.numbers[:-1], rows) if weight.value.dim() == 2 else x.numbers[:-1]


@layer_rule(nn.Bilinear)
def bilinear(site: Site) -> Numbers:
    """Weight (out, first in, second in)."""
    first, second = site.operands()[:2]
    weight = site.parameter("weight", None, first.numbers[-1], second.numbers[-1])
    assert weight is not None
    rows, columns, others = weight.numbers
    site.join(columns, first.numbers[-1], site.reading)
    site.join(others, second.numbers[-1], site.reading)
    site.parameter("bias", rows)
    for attribute, numbers in (("out_features", rows), ("in1_features", columns), ("in2_features", others)):
        site.follow(attribute, numbers)
    site.produce(rows)
    return (*first.numbers[:-1], rows)


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution_layer(site: Site) -> Numbers:
    """Weight (out, in / groups, ...): rows are the output channels, columns the input channels."""
    layer, x = site.layer, site.operand()
    spatial = len(layer.kernel_size)
    inputs = x.numbers[x.value.dim() - spatial - 1]
    if layer.groups == 1:
        weight = site.parameter("weight", None, inputs)
    elif _whole_groups(layer.in_channels, layer.groups):
        weight = site.parameter("weight", None)
    else:
        weight = site.parameter("weight", None, None)
    assert weight is not None
    numbers = _convolution(site, x, weight, spatial, layer.groups)
    site.parameter("bias", numbers[-spatial - 1])
    return numbers


@layer_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed_convolution_layer(site: Site) -> Numbers:
    """Weight (in, out / groups, ...): rows are the input channels."""
    layer, x = site.layer, site.operand()
    spatial = len(layer.kernel_size)
    inputs = x.numbers[x.value.dim() - spatial - 1]
    whole = layer.groups > 1 and _whole_groups(layer.in_channels, layer.groups)
    weight = site.parameter("weight", inputs) if whole else site.parameter("weight", inputs, None)
    assert weight is not None
    numbers = _transposed_convolution(site, x, weight, spatial, layer.groups)
    site.parameter("bias", numbers[-spatial - 1])
    return numbers


def _convolution_function(spatial: int, transposed: bool) -> Callable[[Site], Numbers]:
    """As the layers, on any tensors."""

    def rule(site: Site) -> Numbers:
        x, weight, bias = site.argument(0, "input"), site.argument(1, "weight"), site.argument(2, "bias")
        site.fix_axes(weight, range(2, weight.value.dim()), "is the kernel of")
        core = _transposed_convolution if transposed else _convolution
        numbers = core(site, x, weight, spatial, site.argument(GROUPS, "groups", 1))
        if bias is not None:
            site.join(bias.numbers[0], numbers[-spatial - 1], "is added to what cannot shrink in")
        return numbers

    return rule


for _spatial in (1, 2, 3):
    function_rule(getattr(F, f"conv{_spatial}d"))(_convolution_function(_spatial, transposed=False))
    function_rule(getattr(F, f"conv_transpose{_spatial}d"))(_convolution_function(_spatial, transposed=True))


def _whole_groups(inputs: int, groups: int) -> bool:
    """Whether a grouped convolution shrinks by dropping whole groups (the finer choice) or inside each group."""
    return groups >= inputs // groups


def _convolution(site: Site, x: Operand, weight: Operand, spatial: int, groups: int) -> Numbers:
    channel = x.value.dim() - spatial - 1
    inputs, outputs, columns = x.numbers[channel], weight.numbers[0], weight.numbers[1]
    if groups == 1:
        site.join(columns, inputs, site.reading)
    elif inputs is None:
        site.fix_axes(weight, (0, 1), site.reading)
    elif _whole_groups(len(inputs), groups):  # depthwise: a group is one channel
        by_group = inputs.reshape(groups, -1)
        site.units.tie(by_group[:, :1], by_group)
        if outputs is not None:
            site.units.tie(by_group[:, :1], outputs.reshape(groups, -1))
        site.fix_axes(weight, (1,), "is the inside of a group of")
        _groups_follow(site, by_group[:, 0])
    else:
        by_group = inputs.reshape(groups, -1)
        site.units.tie(by_group[:1], by_group)
        site.join(columns, by_group[0], site.reading)
        if outputs is not None:
            rows = outputs.reshape(groups, -1)
            site.units.tie(rows[:1], rows)
    return _convolved(site, x, channel, outputs)


def _transposed_convolution(site: Site, x: Operand, weight: Operand, spatial: int, groups: int) -> Numbers:
    channel = x.value.dim() - spatial - 1
    inputs = x.numbers[channel]
    site.join(weight.numbers[0], inputs, site.reading)
    outputs = weight.numbers[1]  # of one group
    if groups > 1 and _whole_groups(x.shape[channel], groups):
        site.fix_axes(weight, (1,), "is the inside of a group of")
        outputs = None
        if inputs is not None:
            by_group = inputs.reshape(groups, -1)
            site.units.tie(by_group[:, :1], by_group)
            outputs = np.repeat(by_group[:, 0], weight.shape[1])
            _groups_follow(site, by_group[:, 0])
    elif groups > 1:
        outputs = np.tile(outputs, groups) if outputs is not None else None
        if inputs is not None:
            by_group = inputs.reshape(groups, -1)
            site.units.tie(by_group[:1], by_group)
    return _convolved(site, x, channel, outputs)


def _groups_follow(site: Site, units: Indices) -> None:
    site.follow("groups", units)
    if site.node.op == "call_function":
        written, path = site.written(GROUPS, "groups")
        if written is not None:
            site.sized(path, units)


def _convolved(site: Site, x: Operand, channel: int, outputs: Indices | None) -> Numbers:
    site.follow("out_channels", outputs)
    site.follow("in_channels", x.numbers[channel])
    site.produce(outputs)
    passing = [
        numbers if _pointwise(site, place) else None for place, numbers in enumerate(x.numbers[channel + 1 :])
    ]
    mixed = [channel + 1 + place for place, numbers in enumerate(passing) if numbers is None]
    site.fix_axes(x, mixed, "is a spatial axis of")
    return (*x.numbers[:channel], outputs, *passing)


def _pointwise(site: Site, place: int) -> bool:
    """Whether a layer leaves the positions of a spatial axis alone: a kernel of one, step by step."""
    layer = site.layer if site.node.op == "call_module" else None
    sides = ("kernel_size", "stride", "padding")
    return layer is not None and [getattr(layer, side)[place] for side in sides] == [1, 1, 0]


@layer_rule(nn.Embedding, nn.EmbeddingBag)
def embedding_layer(site: Site) -> Numbers:
    """Weight (vocabulary, channels): only the columns may shrink."""
    weight = site.parameter("weight", None, None)
    assert weight is not None
    return _embedding(site, site.operand(), weight)


@function_rule(F.embedding)
def embedding_function(site: Site) -> Numbers:
    """As the layer, on any table."""
    return _embedding(site, site.argument(0, "input"), site.argument(1, "weight"))


@function_rule("aten::embedding")
def embedding_exported(site: Site) -> Numbers:
    """As the layer; the exported operation takes the table first."""
    return _embedding(site, site.args[1], site.args[0])


def _embedding(site: Site, words: Operand, weight: Operand) -> Numbers:
    site.fix_axes(words, range(words.value.dim()), "is looked up by")
    site.units.fix(weight.numbers[0], f"is the vocabulary of {site.description}")
    columns = weight.numbers[1]
    site.follow("embedding_dim", columns)
    site.produce(columns)
    return (*(None,) * (site.output.dim() - 1), columns)


@layer_rule(nn.PReLU)
def prelu_layer(site: Site) -> Numbers:
    """One slope for all channels, or one each."""
    x = site.operand()
    many = site.layer.num_parameters > 1
    slope = site.parameter("weight", x.numbers[1]) if many else site.parameter("weight")
    assert slope is not None
    return _prelu(site, x, slope)


@function_rule(F.prelu, torch.prelu)
def prelu_function(site: Site) -> Numbers:
    """As the layer."""
    return _prelu(site, site.operands()[0], site.operands()[1])


def _prelu(site: Site, x: Operand, slope: Operand) -> Numbers:
    if slope.value.numel() > 1:
        site.join(slope.numbers[0], x.numbers[1], "is scaled by what cannot shrink in")
        site.follow("num_parameters", x.numbers[1])
    return x.numbers
