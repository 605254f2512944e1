"""FEMNIST: 28 x 28 grey characters by writer, from LEAF's JSON or one ``.npz``."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

from fedtailor.data.catalogue.images import Arrays, ImageSet
from fedtailor.data.files import broken
from fedtailor.data.formats.leaf import read_leaf
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Edition, Source, register
from fedtailor.data.transforms import ImagePreparation

FEMNIST = ImageSet(
    name="femnist",
    shape=(1, 28, 28),
    label_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    preparation=ImagePreparation(mean=(0.9637,), std=(0.1597,)),  # LEAF's background is white
)


def read_femnist(train: Path, test: Path) -> Dataset:
    """FEMNIST from LEAF's folders of JSON files; LEAF's floats become bytes again, which they were."""
    writers: dict[str, int] = {}
    x_train, y_train, client_train = _read_part(train, writers)
    x_test, y_test, client_test = _read_part(test, writers)
    found = Arrays(x_train, y_train, x_test, y_test, client_train, client_test, np.array(list(writers)))
    return FEMNIST.dataset(found, train)


def _read_part(folder: Path, writers: dict[str, int]) -> tuple[Array, Array, Array]:
    """Images, labels and the number of each writer; new writers are added to ``writers``."""
    images, labels, clients = [], [], []
    for file, user, x, y in read_leaf(folder):
        try:
            pixels = np.asarray(x, dtype=np.float64).reshape(len(x), 784)
            labels.append(np.asarray(y, dtype=np.int64))
        except (TypeError, ValueError) as error:
            raise broken(
                file, f"has images of user {user} that are not 784 numbers each ({error})"
            ) from error
        images.append(FEMNIST.pixels(pixels, file))
        clients.append(np.full(len(x), writers.setdefault(user, len(writers)), dtype=np.int32))
    return np.concatenate(images), np.concatenate(labels), np.concatenate(clients)


register(
    Source(
        name="femnist",
        summary="28x28 grey handwritten characters by writer, 62 classes, natural clients",
        editions=(
            Edition(("femnist/data/train", "femnist/data/test"), read_femnist),
            Edition(("femnist/train", "femnist/test"), read_femnist),
            FEMNIST.npz_edition(),
        ),
        advice="LEAF's preprocess.sh makes the files from NIST's originals",
    )
)
