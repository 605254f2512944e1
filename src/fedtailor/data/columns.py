"""One tensor per column: of arrays and lists of numbers, and of every item of a map-style data set.

``batches.py`` makes its batches and examples of such columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtailor.errors import FedtailorError


class MapStyleDataset(Sized, Protocol):
    """What ``Examples.from_dataset`` needs of a PyTorch data set."""

    def __getitem__(self, index: int, /) -> Any: ...


def as_tensor(values: object) -> Tensor:
    """A tensor of a tensor, an array or nested lists of numbers; memory is shared where that is possible.

    Arrays and lists of float64 and float16 become float32, the type of the models; a tensor keeps the type it was
    given.
    """
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.ascontiguousarray(values)
    except ValueError as error:  # numpy's word for lists of unequal shapes
        raise FedtailorError(_unequal(values)) from error
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise FedtailorError(_no_numbers(values, array))
    if not array.flags.writeable:
        array = array.copy()  # a tensor over read-only memory would let a write go through
    if array.dtype in (np.float64, np.float16):
        array = array.astype(np.float32)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch computes little with unsigned types above 8 bits
    return torch.from_numpy(array)


def _unequal(values: object) -> str:
    """Which example of a list is the first of another shape."""
    shapes: list[tuple[int, ...] | None] = []
    for value in values if isinstance(values, Iterable) else ():
        try:
            shapes.append(tuple(np.shape(value)))
        except ValueError:  # a list that is unequal in itself
            shapes.append(None)
    row = next((row for row, shape in enumerate(shapes) if shape is None or shape != shapes[0]), 0)
    found = "lists of different lengths" if shapes[row] is None else f"the shape {shapes[row]}"
    like = "" if row == 0 else f", and example 0 the shape {shapes[0]}"
    return f"example {row} has {found}{like}: expected one shape for all; scale, cut or fill them to one"


def _no_numbers(values: object, array: np.ndarray[Any, Any]) -> str:
    """What a column holds that is no number: of a table, which of its columns."""
    kinds: Any = getattr(values, "dtypes", None)  # of a pandas DataFrame, by column
    if hasattr(kinds, "items"):
        words = [
            str(name) for name, kind in kinds.items() if np.dtype(object) == kind or kind.kind not in "biuf"
        ]
        return f"the columns {', '.join(words)} hold no numbers: expected numbers; leave them out or replace them"
    texts = array.dtype.kind in "US" or (array.size > 0 and all(isinstance(each, str) for each in array.flat))
    if texts and array.ndim == 1:
        return (
            f"a column of texts ({str(array[0])[:20]!r} ...): expected numbers; write them to a .csv or .jsonl "
            "file with text and label and pass its path, or make numbers of them, "
            "fedtailor.data.Vocabulary.of(texts, 'words', size=10_000, length=64).encode(texts); names of classes "
            "become numbers by np.unique(names, return_inverse=True)[1]"
        )
    return f"a column of type {array.dtype}: expected numbers of one shape per example"


def columns_of_dataset(dataset: MapStyleDataset) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Every item of a map-style data set, as whole tensors; items are tuples (inputs, target) or dicts."""
    if len(dataset) == 0:
        raise FedtailorError("a data set without items: expected at least one")
    whole = getattr(dataset, "tensors", None)  # torch.utils.data.TensorDataset has them already
    if isinstance(whole, tuple) and all(isinstance(column, Tensor) for column in whole):
        return whole
    first = dataset[0]
    if isinstance(first, Mapping):
        names = list(first)
        columns = _fill(dataset, names, len(dataset))
        return dict(zip(names, columns, strict=True))
    if not isinstance(first, (tuple, list)):
        raise FedtailorError(f"an item of type {type(first).__name__}: expected (inputs, target) or a dict")
    return tuple(_fill(dataset, list(range(len(first))), len(dataset)))


def _fill(dataset: MapStyleDataset, keys: list[Any], count: int) -> list[Tensor]:
    columns: list[Tensor] = []
    for row in range(count):
        item = dataset[row]
        if len(item) != len(keys):
            raise FedtailorError(f"item {row} has {len(item)} entries: expected {len(keys)} like the first")
        for position, key in enumerate(keys):
            value = _item_tensor(item[key], row)
            if row == 0:
                columns.append(torch.empty((count, *value.shape), dtype=value.dtype))
            if value.shape != columns[position].shape[1:]:
                raise FedtailorError(
                    f"item {row} has shape {tuple(value.shape)}: "
                    f"expected {tuple(columns[position].shape[1:])} like the first"
                )
            columns[position][row] = value
    return columns


def _item_tensor(value: object, row: int) -> Tensor:
    if isinstance(value, (Tensor, np.ndarray)):
        return as_tensor(value) if np.ndim(value) else torch.as_tensor(value)
    if isinstance(value, (bool, int, float, np.number)):
        return torch.as_tensor(value)
    if isinstance(value, list) and value:  # the tokens of a text
        return as_tensor(value)
    if isinstance(value, str):
        raise FedtailorError(
            f"item {row} holds the text {value[:20]!r}: expected numbers; pass (x, y) with names of classes as y, or "
            "number the classes from 0 in the data set"
        )
    raise FedtailorError(
        f"item {row} holds a {type(value).__name__}: expected tensors, arrays or numbers; "
        f"give the data set a transform that makes tensors"
    )
