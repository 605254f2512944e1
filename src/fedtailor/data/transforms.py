"""Preparation of whole batches: normalisation, crop and flip of images, windows of text.

What a preparation does to every input, evaluation included, is part of what is deployed: ``layer`` is it as a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedtailor.data.batches import Batch, Examples, Preparation
from fedtailor.errors import FedtailorError, require


def normalise(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], white: float = 255.0
) -> Tensor:
    """Stored pixels (N, C, H, W) as floats: ``(pixel / white - mean) / std`` per channel."""
    scales, shifts = _scales_and_shifts(mean, std, white)
    pixels = images.to(torch.float32, copy=True)  # changed in place below, so never the caller's own
    if len(mean) == 1:  # plain numbers: small batches of grey images are not worth two more tensors
        return pixels.mul_(scales[0]).add_(shifts[0])
    shape = (1, len(mean), 1, 1)
    scale = torch.tensor(scales, device=images.device).view(shape)
    shift = torch.tensor(shifts, device=images.device).view(shape)
    return pixels.mul_(scale).add_(shift)


def _scales_and_shifts(
    mean: tuple[float, ...], std: tuple[float, ...], white: float
) -> tuple[list[float], list[float]]:
    return [1.0 / (white * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]


@runtime_checkable
class Deployable(Protocol):
    """A preparation that can be deployed; one of the user's own may be one too."""

    @property
    def key(self) -> str | None:
        """The input of a dict batch that it prepares; None: the first one of a tuple."""
        ...

    def layer(self) -> nn.Module:
        """What it does to raw inputs, without augmentation, as a plain module."""
        ...

    def as_data(self) -> dict[str, Any]:
        """The same as plain values, for a file."""
        ...


def scaling_layer(scale: Tensor, shift: Tensor, fill: bool = False) -> nn.Module:
    """``x * scale + shift`` in float32, with 0 for what is no number if ``fill``; no code of fedtailor is in it."""
    graph = fx.Graph()
    x = graph.call_method("to", (graph.placeholder("x"), torch.float32))
    x = graph.call_function(torch.mul, (x, graph.get_attr("scale")))
    x = graph.call_function(torch.add, (x, graph.get_attr("shift")))
    if fill:
        empty = graph.call_function(torch.isnan, (x,))
        x = graph.call_method("masked_fill", (x, empty, 0.0))
    graph.output(x)
    holder = nn.Module()
    holder.register_buffer("scale", scale)
    holder.register_buffer("shift", shift)
    return fx.GraphModule(holder, graph, class_name="Preparation").eval()


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

    def layer(self) -> nn.Module:
        """The normalisation as a module, which is given stored pixels (N, C, H, W) of any type."""
        scales, shifts = _scales_and_shifts(self.mean, self.std, self.white)
        shape = (1, len(self.mean), 1, 1)
        scale, shift = (torch.tensor(values, dtype=torch.float32).view(shape) for values in (scales, shifts))
        return scaling_layer(scale, shift)

    def as_data(self) -> dict[str, Any]:
        """The normalisation as plain values."""
        return {"kind": "pixels", "mean": self.mean, "std": self.std, "white": self.white, "input": self.key}


@dataclass(frozen=True)
class Standardisation:
    """Features to mean 0 and deviation 1: ``(x - mean) / std``, one of each per feature of the first input."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    fill: bool = False  # what is no number counts as the mean
    key: str | None = None  # which input of a dict batch holds the features

    def __post_init__(self) -> None:
        require(
            len(self.mean) == len(self.std) > 0,
            "std",
            self.std,
            f"one value per feature, as mean {self.mean}",
        )
        require(min(self.std) > 0, "std", self.std, "values above 0")

    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Batch:  # noqa: ARG002
        if isinstance(batch, dict):
            if self.key is None or self.key not in batch:
                raise FedtailorError(
                    f"key = {self.key!r}: expected the input that holds features, one of {sorted(batch)}"
                )
            return {**batch, self.key: self.features(batch[self.key])}
        return (self.features(batch[0]), *batch[1:])

    def features(self, x: Tensor) -> Tensor:
        """The prepared features of one batch, float32 (N, features)."""
        scale, shift = (values.to(x.device) for values in self._scale_and_shift())
        scaled = x.to(torch.float32) * scale + shift
        return scaled.masked_fill(scaled.isnan(), 0.0) if self.fill else scaled

    def _scale_and_shift(self) -> tuple[Tensor, Tensor]:
        scales, shifts = _scales_and_shifts(self.mean, self.std, 1.0)
        return torch.tensor(scales, dtype=torch.float32), torch.tensor(shifts, dtype=torch.float32)

    def layer(self) -> nn.Module:
        """The same as a module, which is given raw features (N, features)."""
        return scaling_layer(*self._scale_and_shift(), fill=self.fill)

    def as_data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"kind": "features", "mean": self.mean, "std": self.std, "fill": self.fill, "input": self.key}


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


def deployable(preparation: Preparation | None) -> Deployable | None:
    """What of a preparation can be deployed; nothing of windows of text and of most functions of the user's own."""
    inner = preparation.preparation if isinstance(preparation, Plain) else preparation
    return inner if isinstance(inner, Deployable) else None


def preparation_from(known: Mapping[str, Any] | None) -> Preparation | None:
    """The preparation that ``as_data`` describes, without augmentation; None for one of the user's own."""
    if not known or known.get("kind") not in ("pixels", "features"):
        return None
    mean, std, key = tuple(known["mean"]), tuple(known["std"]), known.get("input")
    if known["kind"] == "pixels":
        return ImagePreparation(mean, std, known["white"], key=key)
    return Standardisation(mean, std, known["fill"], key)


def stored_tensors(examples: Examples) -> list[Tensor]:
    """Everything that decides what the examples are: columns, chosen rows, and the text of windows."""
    columns = examples.columns
    tensors = list(columns.values()) if isinstance(columns, dict) else list(columns)
    if examples.indices is not None:
        tensors.append(examples.indices)
    preparation = examples.preparation
    if isinstance(preparation, Plain):
        preparation = preparation.preparation
    if is_dataclass(preparation):
        values = vars(preparation).values()
        tensors += [value for value in values if isinstance(value, Tensor)]
    return tensors
