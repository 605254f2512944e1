"""scikit-learn's bundled 8 x 8 handwritten digits: 1,797 images, no file needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.sources import Dataset, Edition, Source, register
from fedtailor.data.transforms import ImagePreparation
from fedtailor.errors import FedtailorError

PREPARATION = ImagePreparation(white=16.0)  # pixels are counts from 0 to 16


def read_digits() -> Dataset:
    """Images (N, 1, 8, 8) in [0, 1]; every fifth of each class is a test image, whatever the seed."""
    table = _table()
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1]
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Dataset(
        name="digits",
        train=Examples.of(images[~test], labels[~test], preparation=PREPARATION),
        test=Examples.of(images[test], labels[test], preparation=PREPARATION),
        num_classes=10,
        label_names=tuple("0123456789"),
    )


def _table() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """64 pixels and a label per row; to import scikit-learn takes seconds, in every process that reads them."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise FedtailorError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        )
    return np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", np.uint8, delimiter=",")


register(
    Source(
        name="digits",
        summary="8x8 grey digits of scikit-learn, 1,797 images, 10 classes",
        editions=(Edition((), read_digits),),
    )
)
