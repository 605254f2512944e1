"""Preparation of whole batches: normalisation, crop and flip of images, windows of text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.batches import Batch, Preparation
from fedtailor.errors import FedtailorError, require


def normalise(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], white: float = 255.0
) -> Tensor:
    """Stored pixels (N, C, H, W) as floats: ``(pixel / white - mean) / std`` per channel."""
    scales = [1.0 / (white * s) for s in std]
    shifts = [-m / s for m, s in zip(mean, std, strict=True)]
    pixels = images.to(torch.float32, copy=True)  # changed in place below, so never the caller's own
    if len(mean) == 1:  # plain numbers: small batches of grey images are not worth two more tensors
        return pixels.mul_(scales[0]).add_(shifts[0])
    shape = (1, len(mean), 1, 1)
    scale = torch.tensor(scales, device=images.device).view(shape)
    shift = torch.tensor(shifts, device=images.device).view(shape)
    return pixels.mul_(scale).add_(shift)


def crop_and_flip(images: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Each image (N, C, H, W) shifted by up to ``padding`` pixels (black comes in), half of them mirrored.

    Works on stored pixels, before normalisation, as the papers' pipelines do: the border is black, not the
    mean.
    """
    count, channels, height, width = images.shape
    device = images.device
    draw = generator.device
    down, right = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=draw).to(device)
    mirrored = torch.randint(0, 2, (count,), generator=generator, device=draw).to(device).bool()
    rows = down.view(count, 1) + torch.arange(height, device=device)  # (N, H) in the padded image
    columns = right.view(count, 1) + torch.arange(width, device=device)  # (N, W)
    if flip:
        columns = torch.where(mirrored.view(count, 1), columns.flip(1), columns)
    wide = width + 2 * padding
    positions = (rows.view(count, height, 1) * wide + columns.view(count, 1, width)).view(count, 1, -1)
    padded = F.pad(images, (padding,) * 4).flatten(2)  # (N, C, padded H * padded W)
    return padded.gather(2, positions.expand(-1, channels, -1)).view(count, channels, height, width)


@dataclass(frozen=True)
class ImagePreparation:
    """Pixels to normalised floats; in training, crop and flip first. For the first (or named) input."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    white: float = 255.0
    padding: int = 0
    flip: bool = False
    key: str | None = None  # which input of a dict batch holds the images

    def __post_init__(self) -> None:
        require(
            len(self.mean) == len(self.std) > 0,
            "std",
            self.std,
            f"one value per channel, as mean {self.mean}",
        )
        require(min(self.std) > 0, "std", self.std, "values above 0")
        require(self.white > 0, "white", self.white, "a pixel value above 0")
        require(self.padding >= 0, "padding", self.padding, "0 or more pixels")

    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        if isinstance(batch, dict):
            key = self.key
            if key is None or key not in batch:
                raise FedtailorError(
                    f"key = {key!r}: expected the input that holds images, one of {sorted(batch)}"
                )
            return {**batch, key: self.images(batch[key], generator)}
        return (self.images(batch[0], generator), *batch[1:])

    def images(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """The prepared images of one batch, float32 (N, C, H, W)."""
        if images.dim() != 4 or images.shape[1] != len(self.mean):
            raise FedtailorError(
                f"images of shape {tuple(images.shape)}: expected (count, {len(self.mean)}, height, width)"
            )
        if generator is not None and (self.padding or self.flip):
            images = crop_and_flip(images, self.padding, self.flip, generator)
        return normalise(images, self.mean, self.std, self.white)


@dataclass(frozen=True, eq=False)
class TextWindows:
    """Start positions to windows of characters: the text is kept once, not once per overlapping window.

    A batch (starts (N,), targets) becomes (windows (N, length) int64, targets). With ``shifted`` the target
    is the window moved on by one, (N, length), for models that predict at every position.
    """

    text: Tensor  # all characters as indices, uint8 (characters,)
    length: int = 80
    shifted: bool = False

    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Batch:  # noqa: ARG002
        if isinstance(batch, dict):
            raise FedtailorError("text windows are tuples of starts and targets, not dicts")
        starts, targets = batch
        positions = starts.view(-1, 1) + torch.arange(self.length, device=starts.device)
        windows = self.text[positions].long()
        return (windows, self.text[positions + 1].long() if self.shifted else targets)

    def to(self, device: torch.device | str) -> TextWindows:
        """The same windows over the text on another device."""
        return replace(self, text=self.text.to(device))


@dataclass(frozen=True)
class Plain:
    """A preparation that never augments, whatever it wraps."""

    preparation: Preparation

    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Batch:  # noqa: ARG002
        return self.preparation(batch, None)

    def to(self, device: torch.device | str) -> Plain:
        """The same, with the wrapped preparation on another device."""
        inner = self.preparation
        return Plain(inner.to(device)) if hasattr(inner, "to") else self
