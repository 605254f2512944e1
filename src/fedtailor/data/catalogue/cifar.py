"""CIFAR-10, CIFAR-100 (binary and python distributions) and CINIC-10: 32 x 32 colour images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.data.catalogue.images import Arrays, ImageSet
from fedtailor.data.download import RemoteFile
from fedtailor.data.files import broken
from fedtailor.data.formats.archive import walk
from fedtailor.data.formats.cifar import read_binary, read_python
from fedtailor.data.formats.images import stack_images
from fedtailor.data.sources import Dataset, Edition, Source, register
from fedtailor.data.transforms import ImagePreparation
from fedtailor.errors import unknown

HOSTS = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")

CIFAR10 = ImageSet(
    name="cifar10",
    shape=(3, 32, 32),
    label_names=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    preparation=ImagePreparation(
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), padding=4, flip=True
    ),
)
CIFAR100_PREPARATION = ImagePreparation(
    mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762), padding=4, flip=True
)
FINE_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
    pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
    seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table
    tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
    worm
"""
COARSE_NAMES = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2
"""
CIFAR100 = {
    "fine": ImageSet("cifar100", (3, 32, 32), tuple(FINE_NAMES.split()), CIFAR100_PREPARATION),
    "coarse": ImageSet("cifar100", (3, 32, 32), tuple(COARSE_NAMES.split()), CIFAR100_PREPARATION),
}
CINIC10 = ImageSet(
    name="cinic10",
    shape=(3, 32, 32),
    label_names=CIFAR10.label_names,
    preparation=ImagePreparation(
        mean=(0.4789, 0.4723, 0.4305), std=(0.2421, 0.2383, 0.2587), padding=4, flip=True
    ),
)

_TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


def read_cifar10_binary(path: Path) -> Dataset:
    """CIFAR-10 from a folder or archive of ``.bin`` files: one label byte, then the pixels."""
    train = read_binary(path, [f"{name}.bin" for name in _TRAIN_BATCHES], label_bytes=1, label=0)
    test = read_binary(path, ["test_batch.bin"], label_bytes=1, label=0)
    return CIFAR10.dataset(Arrays(*train, *test), path)


def read_cifar10_python(path: Path) -> Dataset:
    """CIFAR-10 from a folder or archive of the python distribution."""
    train = read_python(path, _TRAIN_BATCHES, "labels")
    test = read_python(path, ["test_batch"], "labels")
    return CIFAR10.dataset(Arrays(*train, *test), path)


def _cifar100(labels: str) -> ImageSet:
    if labels not in CIFAR100:
        raise unknown("labels of cifar100", labels, CIFAR100)
    return CIFAR100[labels]


def read_cifar100_binary(path: Path, labels: str = "fine") -> Dataset:
    """CIFAR-100 from ``.bin`` files: a coarse and a fine label byte, then the pixels."""
    images = _cifar100(labels)
    which = ("coarse", "fine").index(labels)
    train = read_binary(path, ["train.bin"], label_bytes=2, label=which)
    return images.dataset(Arrays(*train, *read_binary(path, ["test.bin"], label_bytes=2, label=which)), path)


def read_cifar100_python(path: Path, labels: str = "fine") -> Dataset:
    """CIFAR-100 from a folder or archive of the python distribution."""
    images = _cifar100(labels)
    train = read_python(path, ["train"], f"{labels}_labels")
    return images.dataset(Arrays(*train, *read_python(path, ["test"], f"{labels}_labels")), path)


def read_cinic10(path: Path) -> Dataset:
    """CINIC-10 from a folder or archive of PNG files, ``train`` and ``test`` (``valid`` is left out)."""
    wanted = tuple(f"{part}/{label}/" for part in ("train", "test") for label in CINIC10.label_names)
    names, pixels = stack_images(walk(path, lambda name: name.startswith(wanted)), path)
    in_train = np.array([name.startswith("train/") for name in names])
    labels = np.array([CINIC10.label_names.index(name.split("/")[1]) for name in names])
    if in_train.all() or not in_train.any():
        raise broken(path, "has images in only one of train and test")
    return CINIC10.dataset(
        Arrays(pixels[in_train], labels[in_train], pixels[~in_train], labels[~in_train]), path
    )


def read_cifar100_npz(path: Path, labels: str = "fine") -> Dataset:
    """CIFAR-100 from one ``.npz``, whose labels are of the kind that is asked for."""
    return _cifar100(labels).read_npz(path)


register(
    Source(
        name="cifar10",
        summary="32x32 colour photos of animals and vehicles, 50,000 + 10,000 images, 10 classes",
        editions=(
            Edition(("cifar-10-batches-bin",), read_cifar10_binary),
            Edition(("cifar-10-batches-py",), read_cifar10_python),
            Edition(("cifar-10-binary.tar.gz",), read_cifar10_binary),
            Edition(("cifar-10-python.tar.gz",), read_cifar10_python),
            CIFAR10.npz_edition(),
        ),
        remote=(
            RemoteFile(
                "cifar-10-binary.tar.gz",
                tuple(f"{host}/cifar-10-binary.tar.gz" for host in HOSTS),
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170_052_171,
            ),
        ),
    )
)
register(
    Source(
        name="cifar100",
        summary="32x32 colour photos, 50,000 + 10,000 images, 100 classes (or 20 with labels = coarse)",
        editions=(
            Edition(("cifar-100-binary",), read_cifar100_binary),
            Edition(("cifar-100-python",), read_cifar100_python),
            Edition(("cifar-100-binary.tar.gz",), read_cifar100_binary),
            Edition(("cifar-100-python.tar.gz",), read_cifar100_python),
            Edition(("cifar100.npz",), read_cifar100_npz),
        ),
        options={"labels": "fine"},
        remote=(
            RemoteFile(
                "cifar-100-binary.tar.gz",
                tuple(f"{host}/cifar-100-binary.tar.gz" for host in HOSTS),
                "md5:03b5dce01913d631647c71ecec9e9cb8",
                168_513_733,
            ),
        ),
    )
)
register(
    Source(
        name="cinic10",
        summary="32x32 colour photos, CIFAR-10's classes from ImageNet too, 90,000 + 90,000 images",
        editions=(
            CINIC10.npz_edition(),
            Edition(("CINIC-10/train", "CINIC-10/test"), lambda train, _test: read_cinic10(train.parent)),
            Edition(("cinic10/train", "cinic10/test"), lambda train, _test: read_cinic10(train.parent)),
            Edition(("CINIC-10.tar.gz",), read_cinic10),
        ),
        remote=(
            RemoteFile(
                "CINIC-10.tar.gz",
                (
                    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                    "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                ),
                "md5:6ee4d0c996905fe93221de577967a372",
                687_544_992,
            ),
        ),
    )
)
