"""A table of numbers: one row per example, one column per feature, one column for the label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.formats.labels import (
    clients_of,
    label_columns,
    places,
    split_of,
    targets_in_parts,
)
from fedtailor.data.formats.tables import CLIENTS, THOUSANDS, Table, is_nothing, read_table
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Origin, own_dataset, targets_in_words
from fedtailor.data.transforms import Standardisation
from fedtailor.errors import FedtailorError, require, unknown

MISSING = ("refuse", "drop", "mean")
TRUTH = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True)
class TableOptions:
    """Which columns, and what becomes of their numbers."""

    label: str | Sequence[str] | None = None  # columns, where they have other names; several: 0 or 1 each
    client: str | None = None
    split: str | None = None
    leave_out: Sequence[str] | None = None
    targets: str | None = None  # classes, names (every value is a class) or numbers
    num_classes: int | None = None
    standardise: bool = True  # mean 0 and deviation 1 over the training part
    standardise_targets: bool = False  # the same for the label, a quantity
    missing: str = "refuse"  # drop: without the rows that lack a number; mean: that of the column
    decimal: str | None = None  # the sign in numbers of a CSV file, "." or ","; None: as they look

    def __post_init__(self) -> None:
        if self.missing not in MISSING:
            raise unknown("missing", self.missing, MISSING)
        fine = self.standardise or self.missing != "mean"
        require(fine, "missing", self.missing, "standardise = true, which keeps the means")
        require(self.decimal in (None, ".", ","), "decimal", self.decimal, "'.' or ','")
        listed = self.leave_out is None or isinstance(self.leave_out, str | list | tuple)
        require(listed, "leave_out", self.leave_out, "a list of columns")


def read_features(path: Path, options: TableOptions) -> Dataset:
    """The columns that are no label, client or split, as float32 (examples, features)."""
    table = read_table(path, options.decimal)
    labels = label_columns(table, options.label)
    if not labels:
        raise FedtailorError(
            f"{path} has the columns {', '.join(table.columns)}: say which one is the label, "
            f'[data] options = {{ label = "{list(table.columns)[-1]}" }}'
        )
    client = table.one_of(options.client, CLIENTS, "client")
    split = table.one_of(options.split, ("split",), "split")
    names = _feature_names(table, [*labels, client, split], options)
    columns = {name: _numbers(table, name) for name in names}
    table, x = _complete(table, np.column_stack(list(columns.values())), names, options)
    test, clients = split_of(table, split), clients_of(table, client)
    y = targets_in_parts(table, labels, test, options.targets, options.standardise_targets)
    mean, std = _moments(x[~test])
    x = np.where(np.isnan(x), mean, x) if options.missing == "mean" else x
    fill = options.missing == "mean"
    preparation = Standardisation(tuple(mean), tuple(std), fill=fill) if options.standardise else None
    dataset = own_dataset(
        Examples.of(x[~test], y.train, preparation=preparation),
        Examples.of(x[test], y.test, preparation=preparation),
        client_train=None if clients is None else clients[~test],
        client_test=None if clients is None else clients[test],
        num_classes=0 if y.several else options.num_classes,
        name=path.name,
        label_names=y.names,
    )
    dataset = replace(dataset, origin=Origin(targets=y.scale))
    count = " The first column counts the rows and is left out." if table.unnamed else ""
    origin = Origin(
        taken_for=_taken_for(dataset, names, (labels, client, split), options) + count,
        otherwise=_otherwise(dataset, options),
        lines=(table.lines[~test], table.lines[test]),
        line_word=table.line_word,
        columns=tuple(names),
        targets=y.scale,
    )
    return replace(dataset, origin=origin)


def _feature_names(table: Table, others: Sequence[str | None], options: TableOptions) -> list[str]:
    left_out = [options.leave_out] if isinstance(options.leave_out, str) else list(options.leave_out or ())
    for name in left_out:
        if name not in table.columns:
            raise unknown(f"column of {table.path.name}, in leave_out =", name, table.columns)
    names = [name for name in table.columns if name not in others and name not in left_out]
    if not names:
        raise FedtailorError(
            f"{table.path} has no column besides {', '.join(filter(None, others))}: expected features"
        )
    return names


def _numbers(table: Table, name: str) -> Array:
    numbers = table.numbers(name)
    if numbers is None:
        numbers = _truths(table.columns[name])
    if numbers is None:
        words = table.first_word(name)
        commas = (
            ' (if a comma begins the decimals, { decimal = "," })'
            if THOUSANDS.match(words.strip("'"))
            else ""
        )
        raise FedtailorError(
            f"column {name} of {table.path} holds {words}: expected numbers{commas}. Leave it out, "
            f'[data] options = {{ leave_out = ["{name}"] }}, or replace it by columns of numbers; if it is the '
            f'label, {{ label = "{name}" }}; if it is a text to classify, {{ text = "{name}" }}'
        )
    return numbers


def _truths(cells: Sequence[object]) -> Array | None:
    """A column of true and false, as pandas and spreadsheets write it, as 1 and 0; None where it holds other words."""
    words = [np.nan if is_nothing(cell) else TRUTH.get(str(cell).strip().lower()) for cell in cells]
    return None if None in words else np.asarray(words, dtype=np.float64)


def _complete(table: Table, x: Array, names: Sequence[str], options: TableOptions) -> tuple[Table, Array]:
    """The table without the rows that lack a number, where the user said so; refused where nothing was said."""
    lacking = np.isnan(x)
    rows = lacking.any(axis=1)
    if options.missing == "mean" or not rows.any():
        return table, x
    if options.missing == "refuse":
        columns = [names[place] for place in np.flatnonzero(lacking.any(axis=0)).tolist()]
        raise FedtailorError(
            f"{table.path} lacks {int(lacking.sum()):,} numbers in {', '.join(columns[:5])} "
            f"({places(table.lines[rows], table.line_word)}): fill them in, or say what to do, "
            '[data] options = { missing = "drop" } (without these rows) or { missing = "mean" }'
        )
    kept = np.flatnonzero(~rows)
    return table.take(kept), x[kept]


def _moments(x: Array) -> tuple[list[float], list[float]]:
    """Mean and deviation of each column as far as it has numbers; 1 where there is no deviation to divide by."""
    known = np.isfinite(x)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, x, 0.0).sum(axis=0) / count
    std = np.sqrt((np.where(known, x - mean, 0.0) ** 2).sum(axis=0) / count)
    return mean.tolist(), np.where(std > 0, std, 1.0).tolist()


def _taken_for(
    dataset: Dataset,
    names: Sequence[str],
    others: tuple[Sequence[str], str | None, str | None],
    options: TableOptions,
) -> str:
    labels, client, split = others
    shown = f" ({', '.join(names)})" if len(names) <= 6 else ""
    known = [
        f"the client by {client}" if client else "",
        f"train and test by {split}" if split else "every fifth for testing",
    ]
    scaled = ", scaled to mean 0 and deviation 1" if options.standardise else ""
    label = (
        f"column {labels[0]} is the label"
        if len(labels) == 1
        else f"columns {', '.join(labels)} are the targets"
    )
    return (
        f"{dataset.name} is taken for a table: {len(dataset.train):,} training and {len(dataset.test):,} test rows of "
        f"{len(names)} features{shown}{scaled}; {label}, {targets_in_words(dataset)}; "
        f"{', '.join(filter(None, known))}."
    )


def _otherwise(dataset: Dataset, options: TableOptions) -> str:
    ways = ['label = "..."', 'leave_out = ["..."]']
    if dataset.num_classes and not dataset.label_names:
        ways.append('targets = "numbers"')
    if options.standardise:
        ways.append("standardise = false")
    return f"To say otherwise: [data] options = {{ {', '.join(ways)} }}."
