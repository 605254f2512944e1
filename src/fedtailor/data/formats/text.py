"""Texts by person to windows of characters: each window predicts the character that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fedtailor.data.batches import Examples
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset
from fedtailor.data.transforms import TextWindows
from fedtailor.errors import FedtailorError, require

LEAF_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


@dataclass(frozen=True)
class Alphabet:
    """Characters by index, at most 256 of them; any other character counts as the last one, ``other``."""

    letters: str = LEAF_LETTERS
    other: str = " "

    @classmethod
    def of(cls, text: str) -> Alphabet:
        """The characters of a text, the most frequent ones where there are too many; always with a space."""
        points, counts = np.unique(_code_points(text), return_counts=True)
        kept = points[np.argsort(-counts, kind="stable")[:255]]
        return cls("".join(sorted({chr(point) for point in kept.tolist()} | {" "})))

    def indices(self, text: str) -> Array:
        """The index of each character, uint8 (characters,).

        >>> Alphabet("ab ").indices("ba!").tolist()
        [1, 0, 2]
        """
        known = np.array(sorted((ord(letter), index) for index, letter in enumerate(self.letters)))
        points = _code_points(text)
        position = np.minimum(np.searchsorted(known[:, 0], points), len(known) - 1)
        found = known[position, 0] == points
        return np.where(found, known[position, 1], self.letters.index(self.other)).astype(np.uint8)


def _code_points(text: str) -> Array:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)


@dataclass(frozen=True)
class WindowSettings:
    """How texts become examples."""

    window: int = 80  # characters that the model sees
    stride: int = 1  # characters from one window to the next
    shifted: bool = False  # predict at every position, not only after the last
    test_share: float = 0.2  # the end of each text that is kept for testing

    def __post_init__(self) -> None:
        require(self.window >= 1, "window", self.window, "1 character or more")
        require(self.stride >= 1, "stride", self.stride, "1 character or more")
        require(0 < self.test_share < 1, "test_share", self.test_share, "a share between 0 and 1")


def text_dataset(
    name: str, texts: Mapping[str, str], alphabet: Alphabet, settings: WindowSettings
) -> Dataset:
    """Windows over the text of each person, who is a natural client.

    The end of each text is its test part, cut before windows are made: no character is in both parts.
    """
    encoded = [alphabet.indices(text) for text in texts.values()]
    cuts = [len(text) - int(len(text) * settings.test_share) for text in encoded]
    train, client_train = _windows([text[:cut] for text, cut in zip(encoded, cuts, strict=True)], settings)
    test, client_test = _windows([text[cut:] for text, cut in zip(encoded, cuts, strict=True)], settings)
    if len(train) == 0:
        raise FedtailorError(f"no text of {name} is longer than window = {settings.window} characters")
    return Dataset(
        name=name,
        train=train,
        test=test,
        num_classes=len(alphabet.letters),
        label_names=tuple(alphabet.letters),
        client_train=client_train,
        client_test=client_test,
        client_names=np.array(list(texts)),
    )


def _windows(texts: list[Array], settings: WindowSettings) -> tuple[Examples, Array]:
    """Windows over each text, none across two; and for each window its client, the position of its text."""
    begins = np.cumsum([0, *(len(text) for text in texts[:-1])])
    # A window needs one character after it, to predict.
    parts = [
        begin + np.arange(0, len(text) - settings.window, settings.stride)
        for begin, text in zip(begins, texts, strict=True)
    ]
    clients = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    return window_examples(np.concatenate(texts), np.concatenate(parts), settings), clients


def window_examples(text: Array, starts: Array, settings: WindowSettings) -> Examples:
    """The examples whose windows begin at ``starts``; the text is shared by all of them."""
    targets = text[starts + settings.window]
    return Examples(
        (torch.from_numpy(starts.astype(np.int64)), torch.from_numpy(targets)),
        preparation=TextWindows(torch.from_numpy(text), settings.window, settings.shifted),
    )
