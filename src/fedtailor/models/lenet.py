"""The LeNet-5 of Flado (Liao et al., CVPR 2023), as in the code of its predecessor FedDrop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedtailor.errors import require
from fedtailor.models.parts import ConvNet, dropout_rate, image_shape, whole, wholes
from fedtailor.models.registry import register


@register("lenet5")
def lenet5(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    channels: Sequence[int] = (32, 64, 64),
    hidden: int = 512,
    padding: int = 2,
    dropout: float = 0.5,
) -> nn.Module:
    """Flado's LeNet-5: convolutions 5x5, 5x5 and 3x3, average pool to 2x2, two linear layers.

    ``padding`` is that of the 5x5 convolutions: 2 for Fashion-MNIST, 0 for SVHN.
    """
    first, second, third = wholes("channels", channels, count=3)
    hidden = whole("hidden", hidden)
    require(padding in (0, 1, 2), "padding", padding, "0, 1 or 2")
    # The last convolution is not padded and must see 3 x 3 pixels: halve(halve(side - lost) - lost) >= 3.
    lost = 4 - 2 * padding
    in_channels, _, _ = image_shape("lenet5", input_shape, smallest=2 * (2 * 3 + lost) + lost)
    features = nn.Sequential(
        nn.Conv2d(in_channels, first, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Dropout(dropout_rate(dropout)),
        nn.Linear(third * 2 * 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )
    return ConvNet(features, classifier)
