"""Residual networks with a 3x3 stem: HeteroFL's pre-activation form, and the usual one of FjORD and FLANC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.models.parts import image_shape, normalisation, whole, wholes
from fedtailor.models.registry import register

WIDTHS = (64, 128, 256, 512)
Norm = Callable[[int], nn.Module]


class PreactivationBlock(nn.Module):
    """Two 3x3 convolutions, each after its normalisation; the shortcut branches off after the first one."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.norm2 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.project = stride != 1 or in_channels != width
        if self.project:
            self.shortcut = nn.Conv2d(in_channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        kept = self.shortcut(active) if self.project else x
        change: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return change + kept


def _projection(
    in_channels: int, out_channels: int, stride: int, norm: Norm, always: bool = False
) -> nn.Module:
    """The shortcut of a block whose output is shaped unlike its input; otherwise, unless ``always``, the identity."""
    if stride == 1 and in_channels == out_channels and not always:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each normalised, and a ReLU after the sum with the shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.shortcut = _projection(in_channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        change = F.relu(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        return F.relu(change + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, the last of which widens by four."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = norm(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = norm(out_channels)
        self.shortcut = _projection(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        change = F.relu(self.norm1(self.conv1(x)))
        change = F.relu(self.norm2(self.conv2(change)))
        change = self.norm3(self.conv3(change))
        return F.relu(change + self.shortcut(x))


Block = type[PreactivationBlock] | type[BasicBlock] | type[Bottleneck]


@dataclass(frozen=True)
class Shape:
    """The options that all residual networks share: how wide and how deep they are, and how they normalise."""

    widths: Sequence[int]  # of the four stages
    stem: int
    blocks: Sequence[int]  # of the four stages
    norm: str
    groups: int

    def normalise(self, channels: int) -> nn.Module:
        """A normalisation for so many channels."""
        return normalisation(self.norm, channels, self.groups)


class ResNet(nn.Module):
    """Stem, four stages of which all but the first halve the image, global average pool, linear."""

    def __init__(self, image_channels: int, num_classes: int, block: Block, shape: Shape) -> None:
        super().__init__()
        stem, norm = whole("stem", shape.stem), shape.normalise
        widths, blocks = wholes("widths", shape.widths, count=4), wholes("blocks", shape.blocks, count=4)
        preactivation = block is PreactivationBlock
        first = nn.Conv2d(image_channels, stem, 3, padding=1, bias=False)
        self.stem = first if preactivation else nn.Sequential(first, norm(stem), nn.ReLU())
        stages = []
        channels = stem
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            stack: list[nn.Module] = []
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                stack.append(block(channels, width, stride, norm))
                channels = width * block.expansion
            stages.append(nn.Sequential(*stack))
        self.stages = nn.Sequential(*stages)
        self.last = nn.Sequential(norm(channels), nn.ReLU()) if preactivation else nn.Identity()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.stages(self.stem(x)))
        scores: Tensor = self.classifier(torch.flatten(self.pool(x), 1))
        return scores


@register("heterofl-resnet")
def heterofl_resnet(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int] = WIDTHS,
    stem: int = 64,
    blocks: Sequence[int] = (1, 1, 1, 2),
    norm: str = "batch",
    groups: int = 4,
) -> nn.Module:
    """HeteroFL's ResNet as published: pre-activation, 1, 1, 1 and 2 blocks, not quite a ResNet-18."""
    channels, _, _ = image_shape("heterofl-resnet", input_shape)
    return ResNet(channels, num_classes, PreactivationBlock, Shape(widths, stem, blocks, norm, groups))


@register("preresnet18")
def preresnet18(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int] = WIDTHS,
    stem: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    norm: str = "batch",
    groups: int = 4,
) -> nn.Module:
    """Pre-activation ResNet-18 with a 3x3 stem: HeteroFL's later code, FedRolex."""
    channels, _, _ = image_shape("preresnet18", input_shape)
    return ResNet(channels, num_classes, PreactivationBlock, Shape(widths, stem, blocks, norm, groups))


@register("resnet18")
def resnet18(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int] = WIDTHS,
    stem: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    norm: str = "batch",
    groups: int = 4,
    project: bool = False,
) -> nn.Module:
    """ResNet-18 with a 3x3 stem for small images: FjORD, FLANC.

    ``widths`` are those of the four stages and leave the ``stem`` alone, as FLANC's do; where stem and first
    stage differ, the first block gets a projection. With ``project`` it always has one: then the first stage can be
    cut without its stem.
    """
    channels, _, _ = image_shape("resnet18", input_shape)
    shape = Shape(widths, stem, blocks, norm, groups)
    network = ResNet(channels, num_classes, BasicBlock, shape)
    if project:
        first = network.get_submodule("stages.0.0")
        first.shortcut = _projection(stem, widths[0], 1, shape.normalise, always=True)
    return network


@register("resnet50")
def resnet50(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int] = WIDTHS,
    stem: int = 64,
    blocks: Sequence[int] = (3, 4, 6, 3),
    norm: str = "batch",
    groups: int = 4,
) -> nn.Module:
    """ResNet-50 with a 3x3 stem for small images: OFA-FL.

    ``widths`` are those of the 3x3 convolutions; a stage's output has four times as many channels.
    """
    channels, _, _ = image_shape("resnet50", input_shape)
    return ResNet(channels, num_classes, Bottleneck, Shape(widths, stem, blocks, norm, groups))
