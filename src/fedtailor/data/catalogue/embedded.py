"""8,000 pictures of Fashion-MNIST that come with the package: hard enough that larger networks are better."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedtailor.data.catalogue.mnist import FASHION_MNIST
from fedtailor.data.formats.npz import NEEDED
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Edition, Source, register

FILE = Path(__file__).parents[1] / "embedded" / "fashion-mnist-8k.npz"
# Of the arrays, whichever program packed them; tools/embed_fashion_mnist.py makes them from the published files.
CONTENT = "sha256:d78a1600a2fefd63ca30a95b26fc45067fd9e85a7ce193093dd82da202e88043"


def content_of(arrays: Mapping[str, Array]) -> str:
    """One checksum of all arrays, in the order of their names in the file."""
    digest = hashlib.sha256()
    for name in NEEDED:
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return f"sha256:{digest.hexdigest()}"


def read_embedded() -> Dataset:
    """6,000 training and 2,000 test images (1, 28, 28), as many of each class, prepared as Fashion-MNIST is."""
    return replace(FASHION_MNIST, name="fashion-mnist-8k").read_npz(FILE)


register(
    Source(
        name="fashion-mnist-8k",
        summary="28x28 grey pictures of clothes, 6,000 + 2,000 images of Fashion-MNIST, 10 classes",
        editions=(Edition((), read_embedded),),
    )
)
