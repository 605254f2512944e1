"""What all files of one's own share: labels as numbers, and which examples are for testing."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.data.formats.tables import Table, is_nothing
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


def targets_of(table: Table, name: str, targets: str | None) -> Array:
    """The label column: names, whole numbers (classes) or decimal numbers (a quantity).

    ``targets`` says otherwise: ``names`` makes a class of every value that occurs, ``numbers`` a quantity of whole
    numbers.
    """
    if targets is not None and targets not in TARGETS:
        raise unknown("targets", targets, TARGETS)
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
