"""The CNN of HeteroFL (Diao, Ding and Tarokh, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedtailor.models.parts import ConvNet, image_shape, normalisation, wholes
from fedtailor.models.registry import register


@register("cnn")
def cnn(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    channels: Sequence[int] = (64, 128, 256, 512),
    norm: str = "batch",
    groups: int = 4,
) -> nn.Module:
    """HeteroFL's CNN: 3x3 convolution blocks, global average pool, linear.

    ``channels`` has one entry per block; every block but the last halves the image. ``norm`` is batch, group
    (in ``groups`` groups) or none.
    """
    channels = wholes("channels", channels)
    in_channels, _, _ = image_shape("cnn", input_shape, smallest=2 ** (len(channels) - 1))
    layers: list[nn.Module] = []
    for block, out_channels in enumerate(channels):
        if block > 0:
            layers.append(nn.MaxPool2d(2))
        layers.append(nn.Conv2d(in_channels, out_channels, 3, padding=1))
        layers.append(normalisation(norm, out_channels, groups))
        layers.append(nn.ReLU())
        in_channels = out_channels
    layers.append(nn.AdaptiveAvgPool2d(1))
    return ConvNet(nn.Sequential(*layers), nn.Linear(in_channels, num_classes))
