"""Residual networks with a 3x3 stem: HeteroFL's pre-activation form, and the usual one of FjORD and FLANC."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class ResNet(nn.Module):
    """Stem, four stages of which all but the first halve the image, global average pool, linear."""

    def __init__(
        self,
        image_channels: int,
        num_classes: int,
        block: Block,
        stem: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        norm: Norm,
    ) -> None:
        super().__init__()
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


def _resnet(
    model: str,
    block: Block,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int],
    stem: int,
    blocks: Sequence[int],
    norm: str,
    groups: int,
) -> nn.Module:
    """Check the options, which are the same for all residual networks, and build."""
    widths, blocks = wholes("widths", widths, count=4), wholes("blocks", blocks, count=4)
    image_channels, _, _ = image_shape(model, input_shape)

    def normalise(channels: int) -> nn.Module:
        return normalisation(norm, channels, groups)

    return ResNet(image_channels, num_classes, block, whole("stem", stem), widths, blocks, normalise)


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
    return _resnet(
        "heterofl-resnet", PreactivationBlock, input_shape, num_classes, widths, stem, blocks, norm, groups
    )


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
    return _resnet(
        "preresnet18", PreactivationBlock, input_shape, num_classes, widths, stem, blocks, norm, groups
    )


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
    network = _resnet("resnet18", BasicBlock, input_shape, num_classes, widths, stem, blocks, norm, groups)
    if project:
        first = network.get_submodule("stages.0.0")
        first.shortcut = _projection(
            stem, widths[0], 1, lambda n: normalisation(norm, n, groups), always=True
        )
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
    return _resnet("resnet50", Bottleneck, input_shape, num_classes, widths, stem, blocks, norm, groups)
