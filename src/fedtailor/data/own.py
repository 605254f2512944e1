"""The user's own data at a path: ``.npz`` files, JSON lines, tables, folders of images."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor.data.batches import Examples
from fedtailor.data.formats.archive import walk
from fedtailor.data.formats.features import TableOptions, read_features
from fedtailor.data.formats.images import (
    ENDINGS,
    of_bytes,
    preparation_of,
    stack_images,
    taken_for_images,
)
from fedtailor.data.formats.labelled import TEXTS, LabelledTextOptions, read_labelled_text
from fedtailor.data.formats.labels import for_testing, label_numbers, scaled_targets
from fedtailor.data.formats.lines import numbered_records, read_texts
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.formats.tables import LABELS, read_table
from fedtailor.data.formats.text import Alphabet, WindowSettings, text_dataset
from fedtailor.data.sources import Dataset, Origin, check_options, own_dataset, targets_in_words
from fedtailor.errors import FedtailorError, require, unknown

ENDINGS_OF_FILES = (".csv", ".jsonl", ".npz", ".parquet", ".tsv")
READ_AS = "read_as"  # the option that says what a file is, where its columns do not


def looks_like_path(name: str) -> bool:
    """Whether the name of a data set means a file or folder."""
    return "/" in name or "\\" in name or Path(name).suffix in ENDINGS_OF_FILES or os.path.isdir(name)


def read_own(path: Path, **options: Any) -> Dataset:
    """The user's data at a path: a file (``ENDINGS_OF_FILES``) or a folder of images."""
    path = Path(os.path.expanduser(path))
    kinds = _kinds(path)
    wanted = options.pop(READ_AS, None)
    if wanted is not None and wanted not in kinds:
        raise unknown(f"{READ_AS} of {path.name}", wanted, kinds)
    reader = kinds[wanted or (_guess(path, options) if len(kinds) > 1 else next(iter(kinds)))]
    settings = _settings(reader)
    choice = {READ_AS: ""} if len(kinds) > 1 else {}
    check_options(path.name, options, {**_defaults(reader, settings), **choice})
    return reader(path, **options) if settings is None else reader(path, settings(**options))


def _kinds(path: Path) -> dict[str, Callable[..., Dataset]]:
    """What a file of this ending may hold, by the names of ``read_as``."""
    if os.path.isdir(path):  # of os: names that no file system has are no folders, instead of an error
        return {"images": read_image_folder}
    if not os.path.exists(path):
        whole = path.absolute()
        there = next(folder for folder in whole.parents if os.path.exists(folder))
        missing = whole.relative_to(there).parts[0]
        raise FedtailorError(f"data set {path}: there is no such file or folder; {there} has no {missing!r}")
    if path.suffix not in ENDINGS_OF_FILES:
        raise unknown(
            "kind of data file", path.suffix or path.name, ENDINGS_OF_FILES, hint=", or a folder of images"
        )
    if path.suffix == ".npz":
        return {"arrays": read_arrays}
    if path.suffix == ".jsonl":
        kinds: dict[str, Callable[..., Dataset]] = {"next-character": read_texts_by_user, "rows": read_rows}
    else:
        kinds = {}
    return {**kinds, "labelled-text": read_labelled_text, "table": read_features}


def _guess(path: Path, options: Mapping[str, Any]) -> str:
    """What the names of the columns say that the file holds."""
    table = read_table(path)
    names = {name.lower() for name in table.columns}
    labelled = bool(names & set(LABELS)) or "label" in options
    if path.suffix != ".jsonl":
        return "labelled-text" if "text" in options or (names & set(TEXTS) and labelled) else "table"
    if not len(table):
        raise FedtailorError(f"{path} holds no lines: expected x and y, text and label, or user and text")
    if "tokens" in names or "text" in options or ("text" in names and labelled):
        return "labelled-text"
    if "text" in names:
        return "next-character"
    return "table" if labelled and "x" not in names else "rows"


def _settings(reader: Callable[..., Dataset]) -> type[Any] | None:
    """The dataclass of a reader's options, where they are many."""
    return {read_labelled_text: LabelledTextOptions, read_features: TableOptions}.get(reader)


def _defaults(reader: Callable[..., Dataset], settings: type[Any] | None) -> dict[str, Any]:
    given = inspect.signature(reader if settings is None else settings).parameters.values()
    return {
        item.name: item.default for item in given if settings is not None or item.kind is item.KEYWORD_ONLY
    }


def read_arrays(
    path: Path,
    *,
    num_classes: int | None = None,
    padding: int = 0,
    flip: bool = False,
    standardise_targets: bool = False,
) -> Dataset:
    """``x_train y_train x_test y_test``, optionally ``client_train client_test client_names label_names``.

    Bytes of three or four axes are images: they stay bytes in memory and are normalised, batch by batch,
    with the mean and deviation of the training part. Everything else reaches the model as it is.
    """
    arrays = read_npz(path)
    names = arrays.get("label_names")
    y_train, y_test, found = label_numbers(arrays["y_train"], arrays["y_test"])
    scale: dict[str, list[float]] = {}
    if standardise_targets:
        y_train, y_test, scale = scaled_targets(arrays["y_train"], arrays["y_test"])
    train, test = of_bytes(
        Examples.of(arrays["x_train"], y_train),
        Examples.of(arrays["x_test"], y_test),
        padding=padding,
        flip=flip,
    )
    dataset = own_dataset(
        train,
        test,
        client_train=arrays.get("client_train"),
        client_test=arrays.get("client_test"),
        num_classes=num_classes,
        name=path.name,
        label_names=found if names is None else tuple(map(str, names.tolist())),
        client_names=arrays.get("client_names"),
    )
    dataset = replace(dataset, origin=Origin(targets=scale))
    return replace(dataset, origin=Origin(*_taken_for(dataset), symbols=_symbols(dataset), targets=scale))


def read_texts_by_user(
    path: Path, *, window: int = 80, stride: int = 1, shifted: bool = False, test_share: float = 0.2
) -> Dataset:
    """JSON lines with ``user`` and ``text``, as windows of characters like Shakespeare's roles."""
    texts = read_texts(path)
    alphabet = Alphabet.of("".join(texts.values()))
    dataset = text_dataset(path.name, texts, alphabet, WindowSettings(window, stride, shifted, test_share))
    taken_for = (
        f"{path.name} is taken for running text: the next of {len(alphabet.letters)} characters after every {window} "
        f"is to be told; {len(texts):,} users, {len(dataset.train):,} training and {len(dataset.test):,} test windows."
    )
    otherwise = 'To say otherwise: a label on every line, and [data] options = { read_as = "labelled-text" }.'
    return replace(dataset, origin=Origin(taken_for, otherwise))


def read_rows(path: Path, *, num_classes: int | None = None, standardise_targets: bool = False) -> Dataset:
    """JSON lines with ``x``, ``y`` and optionally ``client`` and ``split`` (train or test).

    Where no line has a ``split``, every fifth is for testing.
    """
    columns: dict[str, list[Any]] = {"line": [], "x": [], "y": [], "client": [], "test": []}
    for line, record in numbered_records(path):
        if "x" not in record or "y" not in record or record.get("split", "train") not in {"train", "test"}:
            raise FedtailorError(
                f"line {line} of {path} has {', '.join(record)}: expected x, y and, if any, split = train or test; "
                "or text and label; or user and text"
            )
        columns["line"].append(line)
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
    test = for_testing(columns["test"])
    y_train, y_test, names = label_numbers(y[~test], y[test])
    scale: dict[str, list[float]] = {}
    if standardise_targets:
        y_train, y_test, scale = scaled_targets(y[~test], y[test])
    ids = np.asarray([str(entry) for entry in columns["client"]]) if all(given) else None
    dataset = own_dataset(
        Examples.of(x[~test], y_train),
        Examples.of(x[test], y_test),
        client_train=None if ids is None else ids[~test],
        client_test=None if ids is None else ids[test],
        num_classes=num_classes,
        name=path.name,
        label_names=names,
    )
    lines = np.array(columns["line"], dtype=np.int64)
    dataset = replace(dataset, origin=Origin(targets=scale))
    origin = Origin(
        *_taken_for(dataset), lines=(lines[~test], lines[test]), symbols=_symbols(dataset), targets=scale
    )
    return replace(dataset, origin=origin)


def read_image_folder(
    path: Path,
    *,
    mode: str = "RGB",
    size: int | Sequence[int] | None = None,
    padding: int = 0,
    flip: bool = False,
) -> Dataset:
    """``[train|test]/[client]/class/image``: an image lies in the folder of its class, and of its client.

    Without ``train`` and ``test``, every fifth image is a test image. ``mode`` is RGB or L (grey), ``size``
    is (height, width), or one number for both, to scale all images to.
    """
    require(mode in {"RGB", "L"}, "mode", mode, "RGB or L (grey)")
    sides: Any = (size, size) if type(size) is int else size
    listed = isinstance(sides, list | tuple) and len(sides) == 2
    fine = sides is None or (listed and all(type(side) is int and side > 0 for side in sides))
    require(fine, "size", size, "[height, width] in pixels, or one number for both")
    files = walk(path, lambda name: name.lower().endswith(ENDINGS))
    names, pixels = stack_images(files, path, mode, None if sides is None else (sides[0], sides[1]))
    paths = [name.split("/")[:-1] for name in names]
    parted = all(folders and folders[0] in {"train", "test"} for folders in paths)
    test = for_testing([folders[0] == "test" if parted else None for folders in paths])
    below = [folders[1:] if parted else folders for folders in paths]
    depths = {len(folders) for folders in below}
    if depths not in ({1}, {2}):
        raise FedtailorError(_misplaced(path, names, [len(folders) for folders in below]))
    labels, ids = np.array([folders[-1] for folders in below]), np.array([folders[0] for folders in below])
    y_train, y_test, label_names = label_numbers(labels[~test], labels[test])
    preparation = preparation_of(pixels[~test], padding=padding, flip=flip)
    natural = depths == {2}
    dataset = own_dataset(
        Examples.of(pixels[~test], y_train, preparation=preparation),
        Examples.of(pixels[test], y_test, preparation=preparation),
        client_train=ids[~test] if natural else None,
        client_test=ids[test] if natural else None,
        num_classes=len(label_names),
        name=path.name,
        label_names=label_names,
    )
    taken_for, _ = _taken_for(dataset)
    layout = "clients, then classes" if natural else "classes"
    otherwise = f'Folders are {layout}. To say otherwise: [data] options = {{ mode = "L", size = [32, 32] }}.'
    decoding = {"mode": mode, "size": list(pixels.shape[2:])}
    return replace(dataset, origin=Origin(taken_for, otherwise, decoding=decoding))


def _misplaced(path: Path, names: list[str], depths: list[int]) -> str:
    """What is wrong with where images lie, with one of them."""
    expected = (
        "expected a folder for each class, class/image, or for each client and class, client/class/image"
    )
    if set(depths) == {0}:
        return f"{path} has images that are in no folder of a class ({names[0]}): {expected}"
    where = " and ".join(
        f"{depth} folders deep ({names[depths.index(depth)]})" for depth in sorted(set(depths))
    )
    return f"{path} has images {where}: {expected}; the same for all"


def _symbols(dataset: Dataset) -> int | None:
    """How many tokens there are, where inputs are rows of whole numbers; at least as many as classes."""
    inputs = [part.columns[0] for part in (dataset.train, dataset.test) if isinstance(part.columns, tuple)]
    if any(x.dim() != 2 or x.is_floating_point() for x in inputs):
        return None
    return max(dataset.num_classes, *(int(x.max()) + 1 for x in inputs if x.numel()))


def _taken_for(dataset: Dataset) -> tuple[str, str]:
    """What arrays of these types are taken for, and how to say otherwise."""
    columns = dataset.train.columns
    assert isinstance(columns, tuple)
    x = columns[0]
    sides = " x ".join(map(str, x.shape[1:])) or "one"
    if x.dtype == torch.uint8:
        kind = taken_for_images(x)
        otherwise = "To say otherwise: store decimal numbers, which reach the network as they are."
    elif x.is_floating_point():
        kind = f"decimal numbers ({sides} each), as they are"
        otherwise = "If they are pixels, store bytes (uint8): those are normalised." if x.dim() > 2 else ""
    else:
        kind = f"whole numbers ({sides} each), such as tokens"
        otherwise = "If they are measurements, store decimal numbers."
    sizes = f"{len(dataset.train):,} training and {len(dataset.test):,} test examples"
    return f"{dataset.name} is taken for {kind}: {sizes} of {targets_in_words(dataset)}.", otherwise
