"""The user's own data at a path: ``.npz`` files, JSON lines, folders of images."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.formats.archive import walk
from fedtailor.data.formats.images import ENDINGS, stack_images
from fedtailor.data.formats.lines import read_records, read_texts
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.formats.text import Alphabet, WindowSettings, text_dataset
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, check_options, own_dataset
from fedtailor.data.transforms import ImagePreparation
from fedtailor.errors import FedtailorError, require, unknown

ENDINGS_OF_FILES = (".npz", ".jsonl")
TEST_EVERY = 5  # where the user's data has no test part, every fifth example becomes one


def looks_like_path(name: str) -> bool:
    """Whether the name of a data set means a file or folder."""
    return "/" in name or "\\" in name or Path(name).suffix in ENDINGS_OF_FILES or Path(name).is_dir()


def read_own(path: Path, **options: Any) -> Dataset:
    """The user's data at a path: a ``.npz`` or ``.jsonl`` file, or a folder of images."""
    path = path.expanduser()
    reader = _reader(path)
    parameters = inspect.signature(reader).parameters.values()
    defaults = {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}
    check_options(path.name, options, defaults)
    return reader(path, **options)


def _reader(path: Path) -> Callable[..., Dataset]:
    if path.is_dir():
        return read_image_folder
    if path.suffix not in ENDINGS_OF_FILES:
        raise unknown(
            "kind of data file", path.suffix or path.name, ENDINGS_OF_FILES, hint=", or a folder of images"
        )
    if not path.exists():
        raise FedtailorError(f"data set {path}: there is no such file")
    if path.suffix == ".npz":
        return read_arrays
    first = next(iter(read_records(path)), None)
    if first is None:
        raise FedtailorError(f"{path} holds no lines: expected x and y, or user and text, on each")
    return read_texts_by_user if "text" in first[1] else read_rows


def read_arrays(
    path: Path, *, num_classes: int | None = None, padding: int = 0, flip: bool = False
) -> Dataset:
    """``x_train y_train x_test y_test``, optionally ``client_train client_test client_names label_names``.

    Bytes of three or four axes are images: they stay bytes in memory and are normalised, batch by batch,
    with the mean and deviation of the training part. Everything else reaches the model as it is.
    """
    arrays = read_npz(path)
    names = arrays.get("label_names")
    y_train, y_test, found = _label_numbers(arrays["y_train"], arrays["y_test"])
    x_train, x_test = arrays["x_train"], arrays["x_test"]
    preparation = None
    if x_train.dtype == np.uint8 and x_train.ndim in {3, 4}:
        x_train, x_test = _channels_first(x_train), _channels_first(x_test)
        preparation = preparation_of(x_train, padding=padding, flip=flip)
    elif x_train.dtype == np.uint8:
        x_train, x_test = x_train.astype(np.int64), x_test.astype(np.int64)
    return own_dataset(
        Examples.of(x_train, y_train, preparation=preparation),
        Examples.of(x_test, y_test, preparation=preparation),
        client_train=arrays.get("client_train"),
        client_test=arrays.get("client_test"),
        num_classes=num_classes,
        name=path.name,
        label_names=found if names is None else tuple(map(str, names.tolist())),
        client_names=arrays.get("client_names"),
    )


def read_texts_by_user(
    path: Path, *, window: int = 80, stride: int = 1, shifted: bool = False, test_share: float = 0.2
) -> Dataset:
    """JSON lines with ``user`` and ``text``, as windows of characters like Shakespeare's roles."""
    texts = read_texts(path)
    alphabet = Alphabet.of("".join(texts.values()))
    return text_dataset(path.name, texts, alphabet, WindowSettings(window, stride, shifted, test_share))


def read_rows(path: Path, *, num_classes: int | None = None) -> Dataset:
    """JSON lines with ``x``, ``y`` and optionally ``client`` and ``split`` (train or test).

    Where no line has a ``split``, every fifth is for testing.
    """
    columns: dict[str, list[Any]] = {"x": [], "y": [], "client": [], "test": []}
    for where, record in read_records(path):
        if "x" not in record or "y" not in record or record.get("split", "train") not in {"train", "test"}:
            raise FedtailorError(
                f"{where} has {', '.join(record)}: expected x, y and, if any, split = train or test"
            )
        columns["x"].append(record["x"])
        columns["y"].append(record["y"])
        columns["client"].append(record.get("client"))
        columns["test"].append(record["split"] == "test" if "split" in record else None)
    try:
        x, y = np.asarray(columns["x"]), np.asarray(columns["y"])
    except ValueError as error:
        raise FedtailorError(
            f"{path} has examples of different shapes: expected one shape for all x"
        ) from error
    given = [entry is not None for entry in columns["client"]]
    if any(given) and not all(given):
        raise FedtailorError(f"{path} names the client on some lines only: expected on all or on none")
    test = _test_mask(columns["test"])
    y_train, y_test, names = _label_numbers(y[~test], y[test])
    ids = np.asarray([str(entry) for entry in columns["client"]]) if all(given) else None
    return own_dataset(
        Examples.of(x[~test], y_train),
        Examples.of(x[test], y_test),
        client_train=None if ids is None else ids[~test],
        client_test=None if ids is None else ids[test],
        num_classes=num_classes,
        name=path.name,
        label_names=names,
    )


def read_image_folder(
    path: Path,
    *,
    mode: str = "RGB",
    size: tuple[int, int] | None = None,
    padding: int = 0,
    flip: bool = False,
) -> Dataset:
    """``[train|test]/[client]/class/image``: an image lies in the folder of its class, and of its client.

    Without ``train`` and ``test``, every fifth image is a test image. ``mode`` is RGB or L (grey), ``size``
    is (height, width) to scale all images to.
    """
    require(mode in {"RGB", "L"}, "mode", mode, "RGB or L (grey)")
    sized = size is None or (len(size) == 2 and all(type(side) is int and side > 0 for side in size))
    require(sized, "size", size, "[height, width] in pixels")
    files = walk(path, lambda name: name.lower().endswith(ENDINGS))
    names, pixels = stack_images(files, path, mode, None if size is None else (size[0], size[1]))
    paths = [name.split("/")[:-1] for name in names]
    parted = all(folders and folders[0] in {"train", "test"} for folders in paths)
    test = _test_mask([folders[0] == "test" if parted else None for folders in paths])
    below = [folders[1:] if parted else folders for folders in paths]
    depths = {len(folders) for folders in below}
    if depths not in ({1}, {2}):
        raise FedtailorError(
            f"{path} has images {sorted(depths)} folders deep: "
            f"expected class/image for all, or client/class/image for all"
        )
    labels, ids = np.array([folders[-1] for folders in below]), np.array([folders[0] for folders in below])
    y_train, y_test, label_names = _label_numbers(labels[~test], labels[test])
    preparation = preparation_of(pixels[~test], padding=padding, flip=flip)
    natural = depths == {2}
    return own_dataset(
        Examples.of(pixels[~test], y_train, preparation=preparation),
        Examples.of(pixels[test], y_test, preparation=preparation),
        client_train=ids[~test] if natural else None,
        client_test=ids[test] if natural else None,
        num_classes=len(label_names),
        name=path.name,
        label_names=label_names,
    )


def preparation_of(images: Array, *, padding: int = 0, flip: bool = False) -> ImagePreparation:
    """Normalisation with the exact mean and deviation of these pixels, uint8 (N, C, H, W)."""
    values = np.arange(256) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = np.bincount(images[:, channel].reshape(-1), minlength=256)
        centre = float((counts * values).sum() / counts.sum())
        spread = float((counts * (values - centre) ** 2).sum() / counts.sum()) ** 0.5
        mean.append(centre)
        std.append(spread or 1.0)  # a channel of one colour has no spread to divide by
    return ImagePreparation(tuple(mean), tuple(std), padding=padding, flip=flip)


def _channels_first(images: Array) -> Array:
    """Images in any usual order of axes as (N, C, H, W); few channels are told from many pixels."""
    if images.ndim == 3:
        return images[:, None]
    if images.shape[-1] in {1, 3, 4} and images.shape[1] not in {1, 3, 4}:
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return images


def _label_numbers(train: Array, test: Array) -> tuple[Array, Array, tuple[str, ...]]:
    """Labels as numbers; names are numbered in alphabetical order and returned."""
    if train.dtype.kind not in "US":
        return train, test, ()
    names, numbers = np.unique(np.concatenate([train, test.astype(train.dtype)]), return_inverse=True)
    numbers = numbers.reshape(-1)
    return numbers[: len(train)], numbers[len(train) :], tuple(map(str, names.tolist()))


def _test_mask(marked: list[bool | None]) -> Array:
    """Which examples are for testing: as marked, or every fifth where nothing is marked."""
    if all(mark is None for mark in marked):
        return np.asarray(np.arange(len(marked)) % TEST_EVERY == TEST_EVERY - 1)
    return np.array([bool(mark) for mark in marked])
