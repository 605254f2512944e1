"""Weights as int8: one scale for every output channel, symmetric, read back as floats when the network runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

LARGEST = 127


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale of every row of the first axis.

    >>> numbers, scale = quantised(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> numbers, numbers * scale
    (tensor([[  64, -127],
            [   0,    0]], dtype=torch.int8), tensor([[ 1.0079, -2.0000],
            [ 0.0000,  0.0000]]))
    """
    axes = tuple(range(1, weight.dim()))
    scale = weight.detach().abs().amax(dim=axes, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight.detach() / scale).round().to(torch.int8), scale


def int8_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The tensors that become int8: floating-point parameters of two and more axes, tied ones at every place."""
    for layer in module.modules():
        for name, value in layer.named_parameters(recurse=False):
            if value.dim() >= 2 and value.dtype == torch.float32:
                yield layer, name, value


def with_int8_weights(module: nn.Module) -> nn.Module:
    """A copy whose weights are stored as int8; it computes in floats."""
    small = copy.deepcopy(module)
    for layer, name, value in list(int8_weights(small)):
        numbers, scale = quantised(value)
        if isinstance(
            layer, nn.RNNBase | nn.MultiheadAttention
        ):  # they look at their weights' own attributes
            with torch.no_grad():
                value.copy_(numbers * scale)
            continue
        setattr(layer, name, nn.Parameter(numbers, requires_grad=False))
        parametrize.register_parametrization(layer, name, _Scaled(scale), unsafe=True)
    return small.eval()


class _Scaled(nn.Module):
    """Whole numbers times their scale."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, numbers: Tensor) -> Tensor:
        scale: Tensor = self.get_buffer("scale")
        return numbers.to(scale.dtype) * scale
