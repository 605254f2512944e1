"""Shakespeare by role, from LEAF's JSON or from JSON lines: predict the next character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.files import broken
from fedtailor.data.formats.leaf import read_leaf
from fedtailor.data.formats.lines import read_texts
from fedtailor.data.formats.text import Alphabet, WindowSettings, text_dataset, window_examples
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Edition, Source, register

NAME = "shakespeare"
ALPHABET = Alphabet()  # LEAF's 80 characters


def read_roles(path: Path, **options: Any) -> Dataset:
    """Roles from JSON lines."""
    return text_dataset(NAME, read_texts(path), ALPHABET, WindowSettings(**options))


def read_leaf_roles(train: Path, test: Path, **options: Any) -> Dataset:
    """Roles from LEAF's JSON, which holds windows that are cut already and a split of its own."""
    settings = WindowSettings(**options)
    roles: dict[str, int] = {}
    train_part, client_train = _read_part(train, roles, settings)
    test_part, client_test = _read_part(test, roles, settings)
    return Dataset(
        name=NAME,
        train=train_part,
        test=test_part,
        num_classes=len(ALPHABET.letters),
        label_names=tuple(ALPHABET.letters),
        client_train=client_train,
        client_test=client_test,
        client_names=np.array(list(roles)),
    )


def _read_part(folder: Path, roles: dict[str, int], settings: WindowSettings) -> tuple[Examples, Array]:
    """Each window and its next character as one piece of text; new roles are added to ``roles``."""
    pieces, clients = [], []
    for file, user, x, y in read_leaf(folder):
        x, y = x[:: settings.stride], y[:: settings.stride]
        if not all(isinstance(text, str) and len(text) == settings.window for text in x):
            raise broken(file, f"has windows of {user} that are not {settings.window} characters")
        if not all(isinstance(letter, str) and len(letter) == 1 for letter in y):
            raise broken(file, f"has targets of {user} that are not one character")
        pieces.append(ALPHABET.indices("".join(text + letter for text, letter in zip(x, y, strict=True))))
        clients.append(np.full(len(x), roles.setdefault(user, len(roles)), dtype=np.int32))
    count = sum(map(len, clients))
    starts = np.arange(count) * (settings.window + 1)
    return window_examples(np.concatenate(pieces), starts, settings), np.concatenate(clients)


register(
    Source(
        name=NAME,
        summary="lines of plays by role, next of 80 characters, natural clients",
        editions=(
            Edition(("shakespeare/data/train", "shakespeare/data/test"), read_leaf_roles),
            Edition(("shakespeare/train", "shakespeare/test"), read_leaf_roles),
            Edition(("shakespeare.jsonl",), read_roles),
        ),
        options={"window": 80, "stride": 1, "shifted": False, "test_share": 0.2},
        advice="LEAF's preprocess.sh makes the files, or write a shakespeare.jsonl with user and text",
    )
)
