"""Shakespeare by role: predict the next character; from LEAF's JSON, or JSON lines with ``user`` and ``text``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.data.formats.leaf import read_leaf
from fedtailor.data.formats.lines import read_texts
from fedtailor.data.formats.text import Alphabet, text_dataset
from fedtailor.data.files import broken
from fedtailor.data.partitions import Array
from fedtailor.data.sources import Dataset, Layout, Source, register

NAME = "shakespeare"


def read_roles(
    path: Path, window: int = 80, stride: int = 1, shifted: bool = False, test_share: float = 0.2
) -> Dataset:
    """Roles from JSON lines; the end of each role's text is its test part, so that no character is in both."""
    return text_dataset(NAME, read_texts(path), Alphabet(), window, stride, shifted, test_share)
