"""SVHN, cropped house numbers: 32 x 32 colour digits in MATLAB files."""

from __future__ import annotations

from pathlib import Path

from fedtailor.data.catalogue.images import Arrays, ImageSet
from fedtailor.data.download import RemoteFile
from fedtailor.data.formats.mat import read_svhn
from fedtailor.data.sources import Dataset, Edition, Source, register
from fedtailor.data.transforms import ImagePreparation

HOST = "http://ufldl.stanford.edu/housenumbers"

SVHN = ImageSet(
    name="svhn",
    shape=(3, 32, 32),
    label_names=tuple("0123456789"),
    preparation=ImagePreparation(mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970)),
)


def read_svhn_set(train: Path, test: Path) -> Dataset:
    """SVHN's train and test part; the "extra" part is left out."""
    return SVHN.dataset(Arrays(*read_svhn(train), *read_svhn(test)), train.parent)


register(
    Source(
        name="svhn",
        summary="32x32 colour house numbers, 73,257 + 26,032 images, 10 classes",
        editions=(
            Edition(("svhn/train_32x32.mat", "svhn/test_32x32.mat"), read_svhn_set),
            Edition(("train_32x32.mat", "test_32x32.mat"), read_svhn_set),
            SVHN.npz_edition(),
        ),
        remote=(
            RemoteFile(
                "svhn/train_32x32.mat",
                (f"{HOST}/train_32x32.mat",),
                "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
                182_040_794,
            ),
            RemoteFile(
                "svhn/test_32x32.mat",
                (f"{HOST}/test_32x32.mat",),
                "md5:eb5a983be6a315427106f1b164d9cef3",
                64_275_384,
            ),
        ),
    )
)
