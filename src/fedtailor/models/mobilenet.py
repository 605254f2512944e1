"""MobileNetV2 (Sandler et al., CVPR 2018) for small images, the network of APFL."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from torch import Tensor, nn

from fedtailor.errors import require
from fedtailor.models.parts import ConvNet, dropout_rate, image_shape, whole
from fedtailor.models.registry import register

# Expansion, output channels, blocks, stride of the first block. The stem and the second stage, which halve
# the image in the ImageNet form, have stride 1 here.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def round_to_eight(channels: float) -> int:
    """The nearest multiple of 8 that is not more than a tenth below ``channels``.

    >>> [round_to_eight(channels) for channels in (1, 12, 27, 100)]
    [8, 16, 32, 104]
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Convolution, batch norm, ReLU6."""
    return [
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(),
    ]


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1 without activation, add the input if alike."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers = _convolution(in_channels, hidden, 1) if expansion > 1 else []
        layers += _convolution(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.layers(x)
        return x + change if self.residual else change


@register("mobilenetv2")
def mobilenetv2(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    width: float = 1.0,
    last: int = 1280,
    dropout: float = 0.0,
) -> nn.Module:
    """MobileNetV2 with a stem of stride 1 for small images: APFL.

    ``width`` multiplies the channels, rounded to multiples of 8; the ``last`` convolution keeps its channels below
    width 1. A small one learns faster: with 1280 features a classifier needs ten times smaller a rate.
    """
    good = isinstance(width, Real) and not isinstance(width, bool) and width > 0
    require(good, "width", width, "a positive number such as 0.5")
    image_channels, _, _ = image_shape("mobilenetv2", input_shape)
    channels = round_to_eight(32 * width)
    layers = _convolution(image_channels, channels, 3)
    for expansion, base, count, first_stride in STAGES:
        out_channels = round_to_eight(base * width)
        for index in range(count):
            stride = first_stride if index == 0 else 1
            layers.append(InvertedResidual(channels, out_channels, stride, expansion))
            channels = out_channels
    features = round_to_eight(whole("last", last) * max(1.0, width))
    layers += [*_convolution(channels, features, 1), nn.AdaptiveAvgPool2d(1)]
    classifier = nn.Sequential(nn.Dropout(dropout_rate(dropout)), nn.Linear(features, num_classes))
    return ConvNet(nn.Sequential(*layers), classifier)
