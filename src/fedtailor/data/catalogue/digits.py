"""scikit-learn's bundled 8 x 8 handwritten digits: 1,797 images, no file needed."""

from __future__ import annotations

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.sources import Dataset, Edition, Source, register
from fedtailor.data.transforms import ImagePreparation

PREPARATION = ImagePreparation(white=16.0)  # pixels are counts from 0 to 16


def read_digits() -> Dataset:
    """Images (N, 1, 8, 8) in [0, 1]; every fifth of each class is a test image, whatever the seed."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.uint8)
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


register(
    Source(
        name="digits",
        summary="8x8 grey digits of scikit-learn, 1,797 images, 10 classes",
        editions=(Edition((), read_digits),),
    )
)
