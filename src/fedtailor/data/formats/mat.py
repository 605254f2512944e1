"""SVHN's cropped digits: a MATLAB file with ``X`` (32, 32, 3, N) and ``y`` (N, 1)."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from fedtailor.data.files import broken
from fedtailor.data.partitions import Array


def read_svhn(path: Path) -> tuple[Array, Array]:
    """Images (N, 3, 32, 32) and labels from 0 to 9; the file writes the digit 0 as 10."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        arrays = loadmat(path, variable_names=["X", "y"])
    except (
        MatReadError,
        ValueError,
        TypeError,
        KeyError,
        EOFError,
        OSError,
        NotImplementedError,
        zlib.error,
    ) as error:
        raise broken(path, f"cannot be read as a MATLAB file ({error})") from error
    images, labels = arrays.get("X"), arrays.get("y")
    if images is None or labels is None or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise broken(path, "holds no images X of shape (32, 32, 3, count) and labels y")
    digits = labels.reshape(-1).astype(np.int64)
    digits[digits == 10] = 0
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), digits
