"""A network of a class that can be imported, for tests of what is built again from an import path."""

from __future__ import annotations

from torch import Tensor, nn


class Sized(nn.Module):
    """Built without arguments it has 8 hidden channels."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.hidden, self.answer = nn.Linear(5, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.hidden(x).relu())
