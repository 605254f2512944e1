"""CIFAR's binary and python distributions, as folders or as the published archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.data.files import broken
from fedtailor.data.formats.archive import read_members
from fedtailor.data.formats.pickled import NotPlainError, read_plain
from fedtailor.data.partitions import Array

PIXELS = 3 * 32 * 32


def read_binary(path: Path, names: list[str], label_bytes: int, label: int) -> tuple[Array, Array]:
    """Images (N, 3072) and labels of the named files: records of ``label_bytes`` bytes, then the pixels.

    ``label`` says which of the label bytes counts: CIFAR-100 has a coarse and then a fine one.
    """
    members = read_members(path, names)
    length = label_bytes + PIXELS
    for name, content in members.items():
        if not content or len(content) % length:
            raise broken(path / name, f"has {len(content)} bytes, expected a multiple of {length}")
    count = sum(map(len, members.values())) // length
    images, labels = np.empty((count, PIXELS), np.uint8), np.empty(count, np.uint8)
    filled = 0
    for name in names:
        records = np.frombuffer(members.pop(name), np.uint8).reshape(-1, length)
        images[filled : filled + len(records)] = records[:, label_bytes:]
        labels[filled : filled + len(records)] = records[:, label]
        filled += len(records)
    return images, labels


def read_python(path: Path, names: list[str], label_key: str) -> tuple[Array, Array]:
    """Images (N, 3072) and labels of the named files, pickled dicts of ``data`` and a list of labels."""
    members = read_members(path, names)
    images, labels = [], []
    for name in names:
        try:
            batch = read_plain(members[name])
        except NotPlainError as error:
            raise broken(path / name, str(error)) from error
        entries = {_text(key): value for key, value in batch.items()} if isinstance(batch, dict) else {}
        data, label = entries.get("data"), entries.get(label_key)
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
            raise broken(path / name, f"holds no 'data' of {PIXELS} pixels per image")
        if not isinstance(label, list) or not all(isinstance(value, int) for value in label):
            raise broken(path / name, f"holds no list {label_key!r} of whole numbers")
        if len(label) != len(data):
            raise broken(path / name, f"has {len(data)} images and {len(label)} labels, expected as many")
        images.append(data)
        labels.append(np.array(label, dtype=np.int64))
    return np.concatenate(images), np.concatenate(labels)


def _text(key: object) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)
