"""Images: arrays of bytes, and files in one folder per class, from a folder or a tar archive.

Pixels stay bytes in memory and are normalised batch by batch. Files need Pillow, an extra.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.batches import Batch, Examples, inputs_of, target_key
from fedtailor.data.files import broken
from fedtailor.data.partitions import Array
from fedtailor.data.transforms import ImagePreparation
from fedtailor.errors import FedtailorError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
CHANNELS = (1, 3, 4)
MOST_PIXELS = 64_000_000  # of one image: larger ones are mistakes, or meant to fill the memory


def pillow() -> Any:
    """Pillow's Image module, or a sentence that says how to get it."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise FedtailorError(
            "reading image files needs Pillow: install fedtailor with its extra, fedtailor[images]"
        ) from error


def decode(content: bytes, where: str, mode: str, size: tuple[int, int] | None) -> Array:
    """The pixels of one image file, uint8 (H, W) or (H, W, 3); ``size`` is (height, width) to scale to."""
    image_module = pillow()
    try:
        with image_module.open(io.BytesIO(content)) as image:
            if math.prod(image.size) > MOST_PIXELS:
                raise FedtailorError(
                    f"{where} has {math.prod(image.size):,} pixels: expected at most {MOST_PIXELS:,}"
                )
            pixels = image.convert(mode)
            if size is not None and pixels.size != (size[1], size[0]):
                pixels = pixels.resize((size[1], size[0]))
            return np.asarray(pixels)
    except FedtailorError:
        raise
    except image_module.DecompressionBombError as error:
        raise FedtailorError(
            f"{where} has too many pixels: expected at most {MOST_PIXELS:,} ({error})"
        ) from error
    except (OSError, SyntaxError, ValueError) as error:  # Pillow calls a broken PNG a SyntaxError
        reason = (
            "" if "BytesIO" in str(error) else f" ({error})"
        )  # of what Pillow cannot tell it names our buffer
        raise broken(where, f"cannot be read as an image{reason}") from error


def stack_images(
    files: Iterable[tuple[str, bytes]], folder: Path, mode: str = "RGB", size: tuple[int, int] | None = None
) -> tuple[list[str], Array]:
    """Names and pixels (N, C, H, W) of all image files, sorted by name: the same order everywhere."""
    names: list[str] = []
    pixels = bytearray()
    shape: tuple[int, ...] | None = None
    for name, content in files:
        if not name.lower().endswith(ENDINGS):
            continue
        image = decode(content, f"{folder}/{name}", mode, size)
        shape = shape or image.shape
        if image.shape != shape:
            raise FedtailorError(
                f"{folder}/{name} is {image.shape[0]} x {image.shape[1]} pixels: expected "
                f"{shape[0]} x {shape[1]} like the first; give size = [height, width] to scale them all"
            )
        names.append(name)
        pixels += image.tobytes()
    if shape is None:
        raise FedtailorError(f"{folder} holds no image files ({', '.join(ENDINGS)})")
    order = sorted(range(len(names)), key=names.__getitem__)
    stacked = np.frombuffer(pixels, np.uint8).reshape(len(names), shape[0], shape[1], -1)[order]
    return [names[position] for position in order], np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def of_bytes(
    train: Examples, test: Examples, *, padding: int = 0, flip: bool = False
) -> tuple[Examples, Examples]:
    """Both parts with their one input, where it is bytes: of three or four axes images, of others whole numbers.

    Images are normalised with the mean and deviation of the training part. Everything else stays as it is.
    """
    x = only_input(train)
    if x is None or x.dtype != torch.uint8 or train.preparation is not None:
        return train, test
    other = only_input(test)
    if other is None or (len(test) and other.dtype != x.dtype):
        kind = "several" if other is None else str(other.dtype).removeprefix("torch.")
        raise FedtailorError(
            f"the inputs are uint8 in the training part and {kind} in the test part: expected one type"
        )
    change = channels_first if x.dim() in {3, 4} else Tensor.long
    changed = change(x)
    train, test = _with_input(train, changed), _with_input(test, changed if other is x else change(other))
    if x.dim() not in {3, 4}:
        return train, test
    held = changed if train.indices is None else changed.index_select(0, train.indices)
    preparation = preparation_of(held.cpu().numpy(), padding=padding, flip=flip, key=_key(train.columns))
    return train.prepared_by(preparation), test.prepared_by(preparation)


def only_input(examples: Examples) -> Tensor | None:
    """The column that a module is given; None where it is given several."""
    args, kwargs = inputs_of(examples.columns)
    columns = [*args, *kwargs.values()]
    return columns[0] if len(columns) == 1 else None


def taken_for_images(x: Tensor) -> str:
    """What images in bytes are taken for, for a sentence."""
    return f"images ({' x '.join(map(str, x.shape[1:]))}), normalised to mean 0 and deviation 1"


def preparation_of(
    images: Array, *, padding: int = 0, flip: bool = False, key: str | None = None
) -> ImagePreparation:
    """Normalisation with the exact mean and deviation of these pixels, uint8 (N, C, H, W)."""
    values = np.arange(256) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = np.bincount(images[:, channel].reshape(-1), minlength=256)
        centre = float((counts * values).sum() / counts.sum())
        spread = float((counts * (values - centre) ** 2).sum() / counts.sum()) ** 0.5
        mean.append(centre)
        std.append(spread or 1.0)  # a channel of one colour has no spread to divide by
    return ImagePreparation(tuple(mean), tuple(std), padding=padding, flip=flip, key=key)


def channels_first(images: Tensor) -> Tensor:
    """Images in any usual order of axes as (N, C, H, W)."""
    if images.dim() == 3:
        return images[:, None]
    return images.permute(0, 3, 1, 2).contiguous() if channels_last(images.shape) else images


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether (N, H, W, C) is more likely than (N, C, H, W): few channels are told from many pixels."""
    return len(shape) == 4 and shape[-1] in CHANNELS and shape[1] not in CHANNELS


def _key(columns: Batch) -> str | None:
    if not isinstance(columns, dict):
        return None
    target = target_key(columns)
    return next(name for name in columns if name != target)


def _with_input(examples: Examples, x: Tensor) -> Examples:
    columns = examples.columns
    if isinstance(columns, dict):
        return replace(examples, columns={**columns, str(_key(columns)): x})
    return replace(examples, columns=(x, columns[-1]))
