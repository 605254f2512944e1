"""Amounts and names as text for people."""

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


def energy(joules: float) -> str:
    """``1.56 MJ``.

    >>> energy(34.7), energy(1_560_000)
    ('34.7 J', '1.56 MJ')
    """
    amount, _, prefix = short(joules).partition(" ")
    return f"{amount} {prefix}J"


def duration(seconds: float) -> str:
    """``3.9 s``, ``12.5 min``, ``4.2 h``: a time in its largest unit that it fills.

    >>> duration(0.0042), duration(3.92), duration(750), duration(90_000)
    ('4.2 ms', '3.92 s', '12.5 min', '25 h')
    """
    for least, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


def signed(count: float) -> str:
    """``+1.56 M``, ``-300``: a count that is more or less than another."""
    return f"{'-' if count < 0 else '+'}{short(abs(count))}"


def short_name(name: str) -> str:
    """A method or network as people call it: of one from a file, the file without its folders.

    >>> short_name("my/methods/shy.py:Shy"), short_name("fedavg:width=1/5"), short_name("fjord")
    ('shy.py:Shy', 'fedavg:width=1/5', 'fjord')
    """
    file, colon, rest = name.partition(".py:")
    return f"{file.replace(chr(92), '/').rpartition('/')[2]}{colon}{rest}" if colon else name
