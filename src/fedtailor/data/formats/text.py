"""Texts by person to windows of characters: each window predicts the character that follows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedtailor.data.batches import Examples
from fedtailor.data.partitions import Array
from fedtailor.data.transforms import TextWindows

LEAF_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


@dataclass(frozen=True)
class Alphabet:
    """Characters by index; a character outside it counts as ``other``."""

    letters: str = LEAF_LETTERS
    other: str = " "

    def indices(self, text: str) -> Array:
        """The index of each character, uint8 (characters,).

        >>> Alphabet("ab ").indices("ba!").tolist()
        [1, 0, 2]
        """
        known = np.array(sorted((ord(letter), index) for index, letter in enumerate(self.letters)))
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
        position = np.minimum(np.searchsorted(known[:, 0], points), len(known) - 1)
        found = known[position, 0] == points
        return np.where(found, known[position, 1], self.letters.index(self.other)).astype(np.uint8)


def window_starts(length: int, window: int, stride: int) -> Array:
    """Where windows begin in a text of ``length`` characters; each needs one more character to predict."""
    return np.arange(0, length - window, stride, dtype=np.int64)


def windows_by_client(texts: list[Array], window: int, stride: int, shifted: bool) -> tuple[Examples, Array]:
    """Windows over each text, none across two; the position of its text (the client) for each window."""
    begins = np.cumsum([0, *(len(text) for text in texts)])
    parts = [begin + window_starts(len(text), window, stride) for begin, text in zip(begins, texts, strict=False)]
    whole = np.concatenate(texts) if texts else np.empty(0, np.uint8)
    starts = np.concatenate(parts) if parts else np.empty(0, np.int64)
    clients = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    targets = torch.from_numpy(whole[starts + window])
    return (
        Examples(
            (torch.from_numpy(starts), targets),
            preparation=TextWindows(torch.from_numpy(whole), window, shifted),
        ),
        clients.astype(np.int32),
    )
