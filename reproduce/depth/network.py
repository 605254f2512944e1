"""A residual network of one width from end to end, so that every exit sees as many channels as the last."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Block(nn.Module):
    """Norm, ReLU and convolution, twice, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(self.norm1(x).relu())
        added: Tensor = self.conv2(self.norm2(inner).relu())
        return x + added


class EvenResNet(nn.Module):
    """Patches of a picture, ``depth`` blocks, the mean over all places, a linear answer."""

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, width: int = 32, depth: int = 8, patch: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(input_shape[0], width, patch, stride=patch)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.classifier = nn.BatchNorm2d(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x))
        answer: Tensor = self.classifier(self.norm(x).relu().mean((2, 3)))
        return answer
