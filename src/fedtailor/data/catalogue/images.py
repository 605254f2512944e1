"""What all known sets of images share: pixels as uint8 (N, C, H, W), names of labels, a preparation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.files import broken
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Edition
from fedtailor.data.transforms import ImagePreparation


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a reader found: images and labels of both parts, and who made them where that is known."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    client_train: Array | None = None
    client_test: Array | None = None
    client_names: Array | None = None


@dataclass(frozen=True)
class ImageSet:
    """A known set of images: its pixels, labels and preparation, whichever file they came from."""

    name: str
    shape: tuple[int, int, int]  # channels, height, width
    label_names: tuple[str, ...]
    preparation: ImagePreparation

    def dataset(self, arrays: Arrays, where: Path) -> Dataset:
        """The data set of these arrays; ``where`` names the file in errors."""
        return Dataset(
            name=self.name,
            train=self._examples(arrays.x_train, arrays.y_train, where),
            test=self._examples(arrays.x_test, arrays.y_test, where),
            num_classes=len(self.label_names),
            label_names=self.label_names,
            client_train=arrays.client_train,
            client_test=arrays.client_test,
            client_names=arrays.client_names,
        )

    def _examples(self, images: Array, labels: Array, where: Path) -> Examples:
        if len(images) != len(labels):
            raise broken(where, f"has {len(images)} images and {len(labels)} labels, expected as many")
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise broken(
                where, f"has labels of type {labels.dtype} and shape {labels.shape}, expected whole numbers"
            )
        return Examples.of(self.pixels(images, where), labels, preparation=self.preparation)

    def pixels(self, images: Array, where: Path) -> Array:
        """Images as uint8 (N, C, H, W), from any usual order of axes: grey or flat, channels last, floats 0 to 1."""
        channels, height, width = self.shape
        count = len(images)
        if images.shape[1:] in {(height, width), (channels * height * width,)}:
            images = images.reshape(count, channels, height, width)
        elif images.shape[1:] == (height, width, channels):
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        if images.shape[1:] != self.shape:
            raise broken(where, f"has images of shape {images.shape[1:]}, expected {self.shape}")
        if images.dtype == np.uint8:
            return images
        if images.dtype.kind != "f" or (count and not 0 <= float(images.min()) <= float(images.max()) <= 1):
            raise broken(where, f"has pixels of type {images.dtype}, expected bytes, or floats from 0 to 1")
        return np.asarray(np.rint(images * 255), dtype=np.uint8)

    def npz_edition(self) -> Edition:
        """Every set is also read from one ``<name>.npz``."""
        return Edition((f"{self.name}.npz",), self.read_npz)

    def read_npz(self, path: Path) -> Dataset:
        """The data set from one ``.npz`` file."""
        arrays = read_npz(path)
        found = Arrays(
            arrays["x_train"],
            arrays["y_train"],
            arrays["x_test"],
            arrays["y_test"],
            arrays.get("client_train"),
            arrays.get("client_test"),
            arrays.get("client_names"),
        )
        return self.dataset(found, path)
