"""Texts to rows of numbers: a vocabulary of words, of characters, or of tokens that someone else made.

The vocabulary is part of what is deployed: a network knows the numbers, and only the vocabulary knows the words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.files import write_atomically
from fedtailor.data.partitions import Array
from fedtailor.errors import FedtailorError, require, unknown

UNITS = ("words", "characters", "tokens")
PADDING, UNKNOWN = 0, 1  # the numbers of what fills a short text, and of what the vocabulary does not have
RESERVED = 2
WORD = re.compile(r"\w+|[^\w\s]")  # a word, or one sign of punctuation
FORMAT = "fedtailor-vocabulary-1"


def units_of(text: str | Sequence[str], unit: str) -> list[str]:
    """The words of a text in lower case, or its characters; tokens are there already.

    >>> units_of("Don't panic!", "words"), units_of("Hi!", "characters")
    (['don', "'", 't', 'panic', '!'], ['H', 'i', '!'])
    """
    if not isinstance(text, str):
        return list(text)
    return WORD.findall(text.lower()) if unit == "words" else list(text)


@dataclass(frozen=True)
class Vocabulary:
    """Words, characters or tokens by number; 0 fills short texts, 1 stands for everything that is not in it."""

    entries: tuple[str, ...]
    unit: str = "words"
    length: int = 64  # numbers per text: longer texts are cut, shorter ones filled
    places: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise unknown("vocabulary", self.unit, UNITS)
        require(self.length >= 1, "length", self.length, "1 or more")
        require(
            len(self.entries) == len(set(self.entries)), "entries", len(self.entries), "each of them once"
        )
        self.places.update({entry: number for number, entry in enumerate(self.entries, start=RESERVED)})

    @classmethod
    def of(cls, texts: Iterable[str | Sequence[str]], unit: str, size: int, length: int) -> Vocabulary:
        """The most frequent ``size`` of some texts, those of equal frequency in alphabetical order."""
        require(size >= 1, "vocabulary_size", size, "1 or more")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(units_of(text, unit))
        kept = sorted(counts, key=lambda entry: (-counts[entry], entry))[:size]
        return cls(tuple(kept), unit, length)

    def __len__(self) -> int:
        return len(self.entries) + RESERVED

    def encode(self, texts: Sequence[str | Sequence[str]]) -> Array:
        """The numbers of each text, int64 (texts, length).

        >>> Vocabulary(("good", "film"), length=4).encode(["A good film!", "Good"]).tolist()
        [[1, 2, 3, 1], [2, 0, 0, 0]]
        """
        if isinstance(texts, str):
            raise FedtailorError("encode was given one text: expected a list of texts")
        rows = np.full((len(texts), self.length), PADDING, dtype=np.int64)
        for row, text in zip(rows, texts, strict=True):
            numbers = [self.places.get(entry, UNKNOWN) for entry in units_of(text, self.unit)[: self.length]]
            row[: len(numbers)] = numbers
        return rows

    def as_data(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {"unit": self.unit, "length": self.length, "entries": list(self.entries)}

    def save(self, path: Path | str) -> None:
        """Write it as JSON, to stand beside a deployed network."""
        text = json.dumps({"format": FORMAT, **self.as_data()}, ensure_ascii=False)
        write_atomically(Path(path), text.encode("utf-8", "surrogatepass"))

    @classmethod
    def load(cls, path: Path | str) -> Vocabulary:
        """Read what ``save`` wrote."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FedtailorError(f"vocabulary {path} cannot be read: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise FedtailorError(f"{path} is no vocabulary: expected the format {FORMAT!r}")
        return cls(tuple(map(str, found["entries"])), str(found["unit"]), int(found["length"]))

    @cached_property
    def name(self) -> str:
        """How it is called in a sentence."""
        return f"a vocabulary of {len(self):,} {self.unit}"


def usual_length(lengths: Array, most: int) -> int:
    """A length that holds nineteen of twenty texts whole, and no more than ``most``."""
    return int(np.clip(np.quantile(lengths, 0.95), 1, most)) if len(lengths) else 1
