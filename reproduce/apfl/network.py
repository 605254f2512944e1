"""A narrow ResNet that halves the picture first: four blocks, so that a search has groups to choose between."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, added to what came in, which a convolution of size one brings to the same shape."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        added: Tensor = inner + self.shortcut(x)
        return added.relu()


class NarrowResNet(nn.Module):
    """A stem of stride two, a block for each of ``widths`` (all but the first halve the picture), a linear answer."""

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, widths: Sequence[int] = (8, 16, 32, 64)
    ) -> None:
        super().__init__()
        stem = widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(input_shape[0], stem, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(stem)
        )
        pairs = zip((stem, *widths), widths, strict=False)
        self.blocks = nn.Sequential(
            *(Block(channels, width, 1 + (place > 0)) for place, (channels, width) in enumerate(pairs))
        )
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x).relu())
        answer: Tensor = self.classifier(x.mean((2, 3)))
        return answer
