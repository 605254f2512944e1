"""Amounts as text: bytes and counts for people."""

from __future__ import annotations


def size(count: float) -> str:
    """``12.3 MB``: bytes for people, in powers of 1000.

    >>> size(12_345_678)
    '12.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def short(count: float) -> str:
    """``1.56 M``: a count in thousands or millions."""
    for unit in ("", " k", " M", " G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def signed(count: float) -> str:
    """``+1.56 M``, ``-300``: a count that is more or less than another."""
    return f"{'-' if count < 0 else '+'}{short(abs(count))}"
