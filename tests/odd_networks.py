"""Networks of classes that can be imported, for tests of what is built again from an import path."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn


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
