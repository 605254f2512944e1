"""The idx files of MNIST and Fashion-MNIST: a big-endian header with the shape, then the bytes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fedtailor.data.files import broken, read_file
from fedtailor.data.partitions import Array

UNSIGNED_BYTE = 0x08  # the type code of the only kind of idx file that these data sets use


def read_idx(path: Path) -> Array:
    """The array in an idx file, plain or gzip: uint8, in the shape that its header gives."""
    content = read_file(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        raise broken(path, "does not begin as an idx file of unsigned bytes")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise broken(path, f"has {len(content)} bytes, expected {start + math.prod(shape)} for shape {shape}")
    if 0 in shape:
        raise broken(path, f"holds nothing: its shape is {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
