"""What all files of one's own share: labels as numbers, and which examples are for testing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtailor.data.formats.tables import LABELS, Table, is_nothing
from fedtailor.data.partitions import Array
from fedtailor.errors import FedtailorError, require, unknown

TEST_EVERY = 5  # where the user's data has no test part, every fifth example becomes one
MOST_PLACES = 5  # that a sentence names
TARGETS = ("classes", "names", "numbers")


def label_numbers(train: Array, test: Array) -> tuple[Array, Array, tuple[str, ...]]:
    """Labels as numbers; names are numbered in alphabetical order and returned."""
    if train.dtype.kind not in "US":
        return train, test, ()
    names, numbers = np.unique(np.concatenate([train.astype(str), test.astype(str)]), return_inverse=True)
    numbers = numbers.reshape(-1)
    return numbers[: len(train)], numbers[len(train) :], tuple(map(str, names.tolist()))


def for_testing(marked: list[bool | None]) -> Array:
    """Which examples are for testing: as marked, or every fifth where nothing is marked."""
    if all(mark is None for mark in marked):
        return np.asarray(np.arange(len(marked)) % TEST_EVERY == TEST_EVERY - 1)
    return np.array([bool(mark) for mark in marked])


def label_columns(table: Table, given: str | Sequence[str] | None) -> list[str]:
    """The columns that hold the label, or one label each; none where nothing was said and none has a usual name."""
    if given is None or isinstance(given, str):
        found = table.one_of(given, LABELS, "label")
        return [] if found is None else [found]
    named = (
        isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(name, str) for name in given)
    )
    require(named, "label", given, "the name of a column, or a list of several with 0 or 1 each")
    require(len(set(given)) == len(given), "label", given, "each column once")
    return [str(table.one_of(name, LABELS, "label")) for name in given]


def targets_of(table: Table, names: Sequence[str], targets: str | None) -> Array:
    """The label column: names, whole numbers (classes) or decimal numbers (a quantity); of several columns, 0 and 1.

    ``targets`` says otherwise: ``names`` makes a class of every value that occurs, ``numbers`` a quantity of whole
    numbers.
    """
    if targets is not None and targets not in TARGETS:
        raise unknown("targets", targets, TARGETS)
    if len(names) == 1:
        return _one_target(table, names[0], targets)
    require(
        targets in (None, "numbers"),
        "targets",
        targets,
        f"numbers, or nothing, for the columns {', '.join(names)}",
    )
    columns = np.stack([_one_target(table, name, "numbers") for name in names], axis=1)
    if targets == "numbers":
        return columns
    for name, column in zip(names, columns.T, strict=True):
        wrong = np.flatnonzero((column != 0) & (column != 1))
        if len(wrong):
            raise FedtailorError(
                f"column {name} of {table.path}, one of several labels, holds {column[wrong[0]]:g} on "
                f"{table.line_word} {table.lines[wrong[0]]}: expected 0 or 1; or say targets = 'numbers'"
            )
    return columns.astype(np.int64)


def _one_target(table: Table, name: str, targets: str | None) -> Array:
    values = table.columns[name]
    empty = [line for line, value in zip(table.lines.tolist(), values, strict=True) if is_nothing(value)]
    if empty:
        raise FedtailorError(
            f"column {name} of {table.path}, the label, is empty on {places(empty, table.line_word)}: "
            "expected a label in every row"
        )
    numbers = table.numbers(name)
    if targets == "names" or (numbers is None and targets is None):
        if not all(isinstance(value, str | int | float) for value in values):
            raise FedtailorError(
                f"column {name} of {table.path} holds lists: expected one label in every row"
            )
        return np.asarray([str(value).strip() for value in values])
    if numbers is None:
        raise FedtailorError(
            f"column {name} of {table.path} holds {table.first_word(name)}: targets = {targets!r} expects numbers"
        )
    whole = bool(np.all(numbers == np.rint(numbers)))
    if targets == "classes":
        require(whole, "targets", targets, f"whole numbers in column {name} of {table.path}")
    return numbers.astype(np.int64) if whole and targets != "numbers" else numbers.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of both parts as numbers, and what they mean."""

    train: Array
    test: Array
    names: tuple[str, ...]  # of the classes, or of several labels
    several: bool  # 0 or 1 for each of several labels
    scale: Mapping[str, list[float]]  # the mean and std that they had, where they were scaled


def targets_in_parts(
    table: Table, columns: Sequence[str], test: Array, targets: str | None, standardise: bool
) -> Targets:
    """The label columns, told apart by which rows are for testing; ``standardise`` scales a quantity."""
    y = targets_of(table, columns, targets)
    y_train, y_test, names = label_numbers(y[~test], y[test])
    several = y.ndim > 1 and y.dtype.kind == "i"
    scale: Mapping[str, list[float]] = {}
    if standardise:
        require(
            not several, "standardise_targets", True, "quantities, not labels of 0 and 1: targets = 'numbers'"
        )
        y_train, y_test, scale = scaled_targets(y[~test], y[test])
    return Targets(y_train, y_test, tuple(columns) if several else names, several, scale)


def scaled_targets(train: Array, test: Array) -> tuple[Array, Array, dict[str, list[float]]]:
    """Numbers to be told, with mean 0 and deviation 1 over the training part; and the mean and deviation they had."""
    require(train.dtype.kind in "iuf", "standardise_targets", True, "targets that are numbers, not names")
    numbers = train.astype(np.float64).reshape(len(train), -1)
    mean, std = numbers.mean(axis=0), numbers.std(axis=0)
    std = np.where(std > 0, std, 1.0)

    def scaled(values: Array) -> Array:
        flat = (values.reshape(len(values), -1) - mean) / std
        return np.asarray(flat.reshape(values.shape), dtype=np.float32)

    return scaled(train), scaled(test), {"mean": mean.tolist(), "std": std.tolist()}


def split_of(table: Table, name: str | None) -> Array:
    """Which rows are for testing, by the column that says train or test, or every fifth."""
    if name is None:
        return for_testing([None] * len(table))
    for line, value in zip(table.lines.tolist(), table.columns[name], strict=True):
        if value not in {"train", "test"}:
            raise FedtailorError(
                f"{table.line_word} {line} of {table.path} has {name} = {value!r}: expected train or test"
            )
    return for_testing([value == "test" for value in table.columns[name]])


def clients_of(table: Table, name: str | None) -> Array | None:
    """Who made each row, as names; a column that is filled on some lines only is refused."""
    if name is None:
        return None
    values = table.columns[name]
    if any(is_nothing(value) for value in values):
        raise FedtailorError(f"{table.path} names the {name} on some lines only: expected on all or on none")
    return np.asarray([str(value) for value in values])


def places(found: Any, word: str) -> str:
    """Numbers of lines or examples for a sentence.

    >>> places([3], "line"), places([3, 5, 9], "line"), places(range(100), "row")
    ('line 3', 'lines 3, 5 and 9', 'rows 0, 1, 2, 3, 4 and 95 more')
    """
    numbers = [int(number) for number in found]
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if len(numbers) > MOST_PLACES:
        return f"{word}s {', '.join(map(str, numbers[:MOST_PLACES]))} and {len(numbers) - MOST_PLACES:,} more"
    return f"{word}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
