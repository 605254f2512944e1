"""MNIST and Fashion-MNIST: 28 x 28 grey images in idx files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fedtailor.data.catalogue.images import Arrays, ImageSet
from fedtailor.data.download import RemoteFile
from fedtailor.data.formats.idx import read_idx
from fedtailor.data.sources import Dataset, Edition, Source, register
from fedtailor.data.transforms import ImagePreparation

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

MNIST = ImageSet(
    name="mnist",
    shape=(1, 28, 28),
    label_names=tuple("0123456789"),
    preparation=ImagePreparation(mean=(0.1307,), std=(0.3081,)),
)
FASHION_MNIST = ImageSet(
    name="fashion-mnist",
    shape=(1, 28, 28),
    label_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    preparation=ImagePreparation(mean=(0.2860,), std=(0.3530,)),
)


def read_idx_set(images: ImageSet, *paths: Path) -> Dataset:
    """The data set in four idx files, in the order of ``FILES``."""
    x_train, y_train, x_test, y_test = map(read_idx, paths)
    return images.dataset(Arrays(x_train, y_train, x_test, y_test), paths[0].parent)


def _editions(images: ImageSet, *folders: str) -> tuple[Edition, ...]:
    read = partial(read_idx_set, images)
    packed = [
        Edition(tuple(f"{folder}/{file}{ending}" for file in FILES), read)
        for folder in folders
        for ending in (".gz", "")
    ]
    return (*packed, images.npz_edition())


def _remote(
    folder: str, hosts: tuple[str, ...], published: dict[str, tuple[str, int]]
) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{folder}/{file}.gz", tuple(f"{host}/{file}.gz" for host in hosts), *published[file])
        for file in FILES
    )


register(
    Source(
        name="mnist",
        summary="28x28 grey handwritten digits, 60,000 + 10,000 images, 10 classes",
        editions=_editions(MNIST, "mnist", "MNIST/raw"),
        remote=_remote(
            "mnist",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
            {
                FILES[0]: (
                    "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    9912422,
                ),
                FILES[1]: ("sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28881),
                FILES[2]: (
                    "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    1648877,
                ),
                FILES[3]: ("sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4542),
            },
        ),
    )
)
register(
    Source(
        name="fashion-mnist",
        summary="28x28 grey pictures of clothes, 60,000 + 10,000 images, 10 classes",
        editions=_editions(FASHION_MNIST, "fashion-mnist", "FashionMNIST/raw"),
        remote=_remote(
            "fashion-mnist",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            {
                FILES[0]: (
                    "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    26421880,
                ),
                FILES[1]: ("sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29515),
                FILES[2]: (
                    "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    4422102,
                ),
                FILES[3]: ("sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5148),
            },
        ),
    )
)
