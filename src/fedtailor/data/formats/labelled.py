"""Labelled text: each text with one label, from JSON lines or a table; raw, or as tokens that someone else made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.formats.labels import (
    clients_of,
    label_columns,
    places,
    split_of,
    targets_in_parts,
)
from fedtailor.data.formats.tables import CLIENTS, Table, is_nothing, read_table
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Origin, own_dataset, targets_in_words
from fedtailor.data.vocabulary import PADDING, Vocabulary, units_of, usual_length
from fedtailor.errors import FedtailorError, require

TEXTS = ("text", "tokens")  # columns that are taken for the text
LONGEST = {"words": 256, "characters": 512, "tokens": 512}


@dataclass(frozen=True)
class LabelledTextOptions:
    """Which columns, and how texts become numbers."""

    vocabulary: str = "words"  # or characters
    vocabulary_size: int = 10_000
    length: int | None = None  # numbers per text; None: what holds nineteen of twenty texts whole
    text: str | None = None  # columns, where they have other names
    label: str | Sequence[str] | None = None  # several: 0 or 1 each
    client: str | None = None
    targets: str | None = None
    num_classes: int | None = None
    standardise_targets: bool = (
        False  # mean 0 and deviation 1 over the training part, of a label that is a quantity
    )

    def __post_init__(self) -> None:
        kinds = ("words", "characters")
        require(self.vocabulary in kinds, "vocabulary", self.vocabulary, " or ".join(kinds))
        require(self.vocabulary_size >= 1, "vocabulary_size", self.vocabulary_size, "1 or more")
        fine = self.length is None or (type(self.length) is int and self.length >= 1)
        require(fine, "length", self.length, "1 or more")


def read_labelled_text(path: Path, options: LabelledTextOptions) -> Dataset:
    """Texts to rows of numbers, filled with 0 to one length; the vocabulary is that of the training part."""
    table = read_table(path)
    text, labels = table.one_of(options.text, TEXTS, "text"), label_columns(table, options.label)
    if text is None or not labels:
        raise FedtailorError(f"{path} has {', '.join(table.columns)}: expected text (or tokens) and label")
    texts = table.columns[text]
    lines = zip(table.lines.tolist(), texts, strict=True)
    empty = [line for line, value in lines if is_nothing(value) and value != "?"]
    if empty:
        raise FedtailorError(
            f"{path} has no {text} on {places(empty, table.line_word)}: expected {text} and {', '.join(labels)}"
        )
    test = split_of(table, table.one_of(None, ("split",), "split"))
    clients = clients_of(table, table.one_of(options.client, CLIENTS, "client"))
    y = targets_in_parts(table, labels, test, options.targets, options.standardise_targets)
    rows, vocabulary = _numbers(table, text, ~test, options)
    dataset = own_dataset(
        Examples.of(rows[~test], y.train),
        Examples.of(rows[test], y.test),
        client_train=None if clients is None else clients[~test],
        client_test=None if clients is None else clients[test],
        num_classes=0 if y.several else options.num_classes,
        name=path.name,
        label_names=y.names,
    )
    dataset = replace(dataset, origin=Origin(targets=y.scale))
    origin = Origin(
        taken_for=_taken_for(dataset, rows, vocabulary),
        otherwise=_otherwise(path, vocabulary),
        lines=(table.lines[~test], table.lines[test]),
        line_word=table.line_word,
        vocabulary=vocabulary,
        targets=y.scale,
        symbols=int(rows.max(initial=0)) + 1 if vocabulary is None else len(vocabulary),
    )
    return replace(dataset, origin=origin)


def _numbers(
    table: Table, column: str, train: Array, options: LabelledTextOptions
) -> tuple[Array, Vocabulary | None]:
    """All texts as numbers, and the vocabulary; none where the tokens were numbers already."""
    texts = table.columns[column]
    kinds = {_kind(table, column, line, text) for line, text in zip(table.lines.tolist(), texts, strict=True)}
    if len(kinds - {"empty"}) > 1:
        raise FedtailorError(
            f"column {column} of {table.path} holds {' and '.join(sorted(kinds))}: expected one kind on all lines"
        )
    if "numbers" in kinds:
        longest = usual_length(np.array([len(text) for text in texts])[train], LONGEST["tokens"])
        return _filled(table, column, options.length or longest), None
    unit = options.vocabulary if "text" in kinds else "tokens"
    lengths = np.array([len(units_of(text, unit)) for text in texts])
    length = options.length or usual_length(lengths[train], LONGEST[unit])
    chosen = [text for text, trained in zip(texts, train.tolist(), strict=True) if trained]
    vocabulary = Vocabulary.of(chosen, unit, options.vocabulary_size, length)
    return vocabulary.encode(texts), vocabulary


def _kind(table: Table, column: str, line: int, text: Any) -> str:
    if isinstance(text, str):
        return "text"
    if isinstance(text, Sequence):
        if not text:
            return "empty"
        if all(type(token) is int for token in text):
            return "numbers"
        if all(isinstance(token, str) for token in text):
            return "tokens"
    raise FedtailorError(
        f"{table.line_word} {line} of {table.path} has a {column} of type {type(text).__name__}: "
        "expected a text, or a list of words or of whole numbers"
    )


def _filled(table: Table, column: str, length: int) -> Array:
    """Rows of whole numbers, cut and filled to one length."""
    texts = table.columns[column]
    rows = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, line, tokens in zip(rows, table.lines.tolist(), texts, strict=True):
        if tokens and min(tokens) < 0:
            raise FedtailorError(
                f"{table.line_word} {line} of {table.path} has the token {min(tokens)}: expected 0 or more"
            )
        row[: len(tokens)] = tokens[:length]
    return rows


def _taken_for(dataset: Dataset, rows: Array, vocabulary: Vocabulary | None) -> str:
    unit = "tokens" if vocabulary is None else vocabulary.unit
    source = (
        f"{vocabulary.name}" if vocabulary is not None else f"tokens 0 to {int(rows.max(initial=0))} as given"
    )
    return (
        f"{dataset.name} is taken for labelled text: {len(dataset.train):,} training and {len(dataset.test):,} test "
        f"examples of {targets_in_words(dataset)}; the first {rows.shape[1]} {unit} of each, from {source}."
    )


def _otherwise(path: Path, vocabulary: Vocabulary | None) -> str:
    ways = ["length = 100"]
    if vocabulary is not None and vocabulary.unit != "tokens":
        ways.insert(0, f'vocabulary = "{"words" if vocabulary.unit == "characters" else "characters"}"')
    other = "next-character" if path.suffix == ".jsonl" else "table"
    return f'To say otherwise: [data] options = {{ {", ".join(ways)} }}, or {{ read_as = "{other}" }}.'
