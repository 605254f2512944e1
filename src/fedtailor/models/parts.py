"""What the networks share: checks of their options, normalisation by name, and the plain conv net."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor, nn

from fedtailor.errors import require, unknown

LARGEST = 2**24  # of a size: a layer of more has no place in any memory
NORMS = ("batch", "group", "none")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 < int(value) <= LARGEST


def _is_small(value: object) -> bool:
    return not isinstance(value, Integral) or int(value) <= LARGEST


def whole(field: str, value: int) -> int:
    """``value`` as an int, if it is a positive whole number."""
    require(
        _is_whole(value),
        field,
        value,
        "a positive whole number" if _is_small(value) else f"at most {LARGEST:,}",
    )
    return int(value)


def wholes(
    field: str, values: Sequence[int], count: int | None = None, *, empty: bool = False
) -> tuple[int, ...]:
    """``values`` as a tuple of positive ints: ``count`` of them, or any number but none unless ``empty``."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    good = is_list and all(_is_whole(value) for value in values) and (empty or len(values) > 0)
    expected = f"a list of {'' if count is None else f'{count} '}positive whole numbers"
    if is_list and not all(map(_is_small, values)):
        expected += f", each at most {LARGEST:,}"
    require(good and count in (None, len(values)), field, values, expected)
    return tuple(int(value) for value in values)


def dropout_rate(dropout: float) -> float:
    """``dropout`` as a float, if it is a probability below 1."""
    good = isinstance(dropout, Real) and not isinstance(dropout, bool) and 0 <= dropout < 1
    require(good, "dropout", dropout, "a number from 0 to below 1")
    return float(dropout)


def _is_shape(shape: object, count: int) -> bool:
    return isinstance(shape, Sequence) and len(shape) == count and all(_is_whole(size) for size in shape)


def image_shape(model: str, input_shape: Sequence[int], smallest: int = 1) -> tuple[int, int, int]:
    """Channels, height and width, if the image has at least ``smallest`` pixels a side."""
    expected = f"(channels, height, width) of an image, for model {model!r}"
    require(_is_shape(input_shape, 3), "input_shape", input_shape, expected)
    channels, height, width = (int(size) for size in input_shape)
    expected = (
        f"at least {smallest} x {smallest} pixels, for the convolutions and poolings of model {model!r}"
    )
    require(min(height, width) >= smallest, "input_shape", input_shape, expected)
    return channels, height, width


def sequence_length(model: str, input_shape: Sequence[int]) -> int:
    """The number of symbols in one example of text."""
    expected = f"(length,) of a text such as (80,), for model {model!r}"
    require(_is_shape(input_shape, 1), "input_shape", input_shape, expected)
    return int(input_shape[0])


def normalisation(norm: str, channels: int, groups: int) -> nn.Module:
    """The normalisation layer ``norm`` for images of ``channels``."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        groups = whole("groups", groups)
        require(
            channels % groups == 0, "groups", groups, f"a divisor of the {channels} channels it normalises"
        )
        return nn.GroupNorm(groups, channels)
    if norm == "none":
        return nn.Identity()
    raise unknown("norm", norm, NORMS)


class ConvNet(nn.Module):
    """Image features, flattened channel by channel, then a classifier."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores
