"""How the embedded pictures were made: the first images of every class of Fashion-MNIST's own idx files.

    FEDTAILOR_DATA=/folder/with/fashion-mnist python tools/embed_fashion_mnist.py

Nothing is drawn at random and no pixel is changed: 600 training and 200 test images of each of the ten classes, in the
order of the published files, whose checksums ``data/catalogue/mnist.py`` holds and this script checks. The checksum of
what must come out is ``CONTENT`` of ``data/catalogue/embedded.py``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from fedtailor.data.catalogue.embedded import CONTENT, FILE, content_of
from fedtailor.data.catalogue.mnist import FILES
from fedtailor.data.files import search_folders
from fedtailor.data.formats.idx import read_idx
from fedtailor.data.sources import known_sources
from fedtailor.errors import FedtailorError

TRAIN, TEST = 600, 200  # images of each class


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Positions of the first ``count`` images of every class, ascending."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(10)]))


def published(folder: Path) -> list[np.ndarray]:
    """The four arrays of the published files, whose bytes are checked."""
    paths = [folder / "fashion-mnist" / f"{file}.gz" for file in FILES]
    for path, remote in zip(paths, known_sources()["fashion-mnist"].remote, strict=True):
        found = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        if found != remote.checksum:
            raise FedtailorError(f"{path} has {found}: expected {remote.checksum}, as published")
    return [read_idx(path) for path in paths]


def chosen(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the embedded file, from the published ones."""
    x_train, y_train, x_test, y_test = published(folder)
    train, test = first_of_each_class(y_train, TRAIN), first_of_each_class(y_test, TEST)
    return {
        "x_train": x_train[train],
        "y_train": y_train[train],
        "x_test": x_test[test],
        "y_test": y_test[test],
    }


def main() -> None:
    """Write the file, and say whether it holds what it should."""
    folder = next((each for each in search_folders() if (each / "fashion-mnist").is_dir()), None)
    if folder is None:
        raise SystemExit("fashion-mnist is in none of the data folders: set FEDTAILOR_DATA")
    arrays = chosen(folder)
    np.savez_compressed(FILE, allow_pickle=False, **arrays)
    found = content_of(arrays)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes, content {found}")
    if found != CONTENT:
        raise SystemExit(f"expected content {CONTENT}")


if __name__ == "__main__":
    main()
