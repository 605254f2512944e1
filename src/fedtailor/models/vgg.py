"""The VGG-9 of Flado (Liao et al., CVPR 2023), as in the code of its predecessor FedDrop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from fedtailor.errors import unknown
from fedtailor.models.parts import ConvNet, dropout_rate, image_shape, normalisation, wholes
from fedtailor.models.registry import register

Start = Literal["torch", "he"]


@register("vgg9")
def vgg9(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    channels: Sequence[int] = (32, 64, 128, 128, 256, 256),
    hidden: Sequence[int] = (512, 512),
    dropout: float = 0.1,
    start: Start = "torch",
    norm: str = "none",
    groups: int = 4,
) -> nn.Module:
    """Flado's VGG-9: six 3x3 convolutions, global average pool, three linear layers.

    ``channels`` are those of the convolutions, two per resolution, ``hidden`` those of the linear layers. PyTorch's own
    start lets so little through nine layers without norms that SGD stays at chance for hundreds of steps;
    ``start = "he"`` keeps the size of what is passed on: weights of deviation sqrt(2 / fan), biases of zero.
    The paper's network has no ``norm`` behind its convolutions; with "batch" or "group" (``groups``) a narrow one
    learns sooner.
    """
    if start not in get_args(Start):
        raise unknown("start", start, get_args(Start))
    channels = wholes("channels", channels, count=6)
    hidden = wholes("hidden", hidden, count=2)
    width, _, _ = image_shape("vgg9", input_shape, smallest=8)
    features: list[nn.Module] = []
    for index, out_channels in enumerate(channels):
        features.append(nn.Conv2d(width, out_channels, 3, padding=1))
        if norm != "none":
            features.append(normalisation(norm, out_channels, groups))
        features.append(nn.ReLU())
        if index % 2 == 1:
            features.append(nn.MaxPool2d(2))
        width = out_channels
    features.append(nn.AdaptiveAvgPool2d(1))
    classifier: list[nn.Module] = []
    for out_features in hidden:
        classifier += [nn.Linear(width, out_features), nn.ReLU(), nn.Dropout(dropout_rate(dropout))]
        width = out_features
    classifier.append(nn.Linear(width, num_classes))
    network = ConvNet(nn.Sequential(*features), nn.Sequential(*classifier))
    if start == "he":
        network.apply(_as_he)
    return network


def _as_he(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
