"""Networks of classes that can be imported, for tests of what is built again from an import path."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from fedtailor.elasticity.running.exits import with_exits


class Sized(nn.Module):
    """Built without arguments it has 8 hidden channels."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.hidden, self.answer = nn.Linear(5, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.hidden(x).relu())


class LowRank(nn.Module):
    """A frozen layer and an adapter beside it, written by hand: base(x) + up(down(x))."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(input_shape: tuple[int, ...], num_classes: int, rank: int = 4, norm: bool = True) -> nn.Module:
    """An adapted layer between inputs and classes: nothing but its rank can shrink."""
    pixels = prod(input_shape)
    return nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(pixels) if norm else nn.Identity(), LowRank(pixels, num_classes, rank)
    )


class Residual(nn.Module):
    """x + f(x), with one convolution."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


def deep(input_shape: tuple[int, ...], num_classes: int, norm: bool = True) -> nn.Module:
    """Three residual blocks, the first so cheap that a fifth of the width pays for it; two exits before the end."""
    plain = nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3, stride=2, padding=1), Residual(4, norm), nn.Conv2d(4, 20, 3, padding=1),
        Residual(20, norm), Residual(20, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, num_classes),
    )  # fmt: skip
    return with_exits(plain, (torch.zeros(2, *input_shape), torch.zeros(2, dtype=torch.long)), ["1", "3"])
