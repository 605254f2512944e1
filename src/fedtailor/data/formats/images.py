"""Image files in one folder per class, from a folder or a tar archive; needs Pillow, an extra."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.files import broken
from fedtailor.data.partitions import Array
from fedtailor.errors import FedtailorError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


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
            pixels = image.convert(mode)
            if size is not None and pixels.size != (size[1], size[0]):
                pixels = pixels.resize((size[1], size[0]))
            return np.asarray(pixels)
    except (OSError, SyntaxError, ValueError) as error:  # Pillow calls a broken PNG a SyntaxError
        raise broken(where, f"cannot be read as an image ({error})") from error


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
