"""Small networks: the CNNs of FjORD and FLANC for 28-pixel images, and a multilayer perceptron."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedtailor.models.parts import ConvNet, image_shape, whole, wholes
from fedtailor.models.registry import register


def _two_convolutions(
    model: str, input_shape: Sequence[int], channels: Sequence[int]
) -> tuple[list[nn.Module], int]:
    """Two unpadded 5x5 convolutions, each halved by a pool, and how many features they give."""
    first, second = wholes("channels", channels, count=2)
    in_channels, height, width = image_shape(model, input_shape, smallest=16)
    layers: list[nn.Module] = []
    for out_channels in (first, second):
        layers += [nn.Conv2d(in_channels, out_channels, 5), nn.ReLU(), nn.MaxPool2d(2)]
        in_channels, height, width = out_channels, (height - 4) // 2, (width - 4) // 2
    return layers, second * height * width


@register("femnist-cnn")
def femnist_cnn(
    *, input_shape: Sequence[int], num_classes: int, channels: Sequence[int] = (10, 20)
) -> nn.Module:
    """FjORD's FEMNIST CNN: two 5x5 convolutions with pools, one linear layer."""
    layers, features = _two_convolutions("femnist-cnn", input_shape, channels)
    return ConvNet(nn.Sequential(*layers), nn.Linear(features, num_classes))


@register("mnist-cnn")
def mnist_cnn(
    *, input_shape: Sequence[int], num_classes: int, channels: Sequence[int] = (10, 20), hidden: int = 50
) -> nn.Module:
    """Ordered Dropout's MNIST CNN: two 5x5 convolutions with pools, two linear layers."""
    layers, features = _two_convolutions("mnist-cnn", input_shape, channels)
    hidden = whole("hidden", hidden)
    classifier = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
    return ConvNet(nn.Sequential(*layers), classifier)


@register("flanc-cnn")
def flanc_cnn(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    channels: Sequence[int] = (128, 128),
    stem: int = 64,
    shrink: int = 1,
) -> nn.Module:
    """FLANC's Fashion-MNIST CNN: three 3x3 convolutions, two pools, one linear layer.

    ``channels`` leave the ``stem`` convolution alone, as FLANC's widths do. ``shrink`` averages squares of so many
    pixels in front of everything: a quarter of the work for 2.
    """
    first, second = wholes("channels", channels, count=2)
    stem = whole("stem", stem)
    shrink = whole("shrink", shrink)
    in_channels, height, width = image_shape("flanc-cnn", input_shape, smallest=4 * shrink)
    height, width = height // shrink, width // shrink
    features = nn.Sequential(
        nn.Conv2d(in_channels, stem, 3, padding=1),  # no activation after the stem, as in FLANC's code
        nn.Conv2d(stem, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    network = ConvNet(features, nn.Linear(second * (height // 4) * (width // 4), num_classes))
    return nn.Sequential(OrderedDict(shrink=nn.AvgPool2d(shrink), network=network)) if shrink > 1 else network


@register("mlp")
def mlp(*, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Multilayer perceptron with ReLU.

    ``hidden`` has one entry per hidden layer and may be empty, for a linear classifier.
    """
    hidden = wholes("hidden", hidden, empty=True)
    shape = wholes("input_shape", input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for out_features in hidden:
        layers += [nn.Linear(width, out_features), nn.ReLU()]
        width = out_features
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
