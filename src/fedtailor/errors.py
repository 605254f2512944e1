"""What fedtailor raises when it was asked for something that cannot be done."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class FedtailorError(ValueError):
    """A mistake in what was asked for; the message names the field, the value and what would be right."""

    exit_code: ClassVar[int] = 2  # of the command line; the others are those of sysexits.h


class CorruptError(FedtailorError):
    """Saved data that fails its checks, and nothing older to fall back on."""

    exit_code = 65


class QuorumError(FedtailorError):
    """Too few clients gave an update that can be used, however often they were asked."""

    exit_code = 69


class ClientsFailedError(FedtailorError):
    """The code of every client that was asked raised an exception: a mistake in it, not in a client."""

    exit_code = 70


class StorageError(FedtailorError):
    """The disk is full, read-only or broken; what was saved before is untouched."""

    exit_code = 74


class LockedError(FedtailorError):
    """Another process writes into this run folder."""

    exit_code = 75


LONGEST_WORDS = 500  # characters of an exception's message that are kept


def one_line(text: str, longest: int = LONGEST_WORDS) -> str:
    """A text from elsewhere for a line of a file or a terminal: nothing that steers either, and not too much of it.

    >>> one_line("first\\n\\x1b[31msecond"), one_line("abcdef", 3)
    ('first [31msecond', 'abc ...')
    """
    head = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * longest])
    line = " ".join(head.split())
    return line if len(line) <= longest else f"{line[:longest]} ..."


def visible(text: str) -> str:
    """A text with what would steer a terminal written out: names come from configs, from data and from clients.

    >>> print(visible("[/red]\\x1b[31m"))
    [/red]\\x1b[31m
    """
    if text.isprintable():
        return text
    kept = "\n\u00a0"  # a new line, and the space that no line breaks at
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def counted(number: int, what: str, several: str = "") -> str:
    """A number and what it counts.

    >>> counted(1, "seed"), counted(1200, "test example"), counted(2, "class has", "classes have")
    ('1 seed', '1,200 test examples', '2 classes have')
    """
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def in_words(error: BaseException) -> str:
    """An exception in one line: what kind it is and what it says; what fedtailor says is a sentence by itself."""
    kind = "" if isinstance(error, FedtailorError) else type(error).__name__
    return ": ".join(filter(None, (kind, one_line(str(error)))))


def unknown(kind: str, name: object, known: Iterable[str], *, hint: str = "") -> FedtailorError:
    """The error for a misspelt name: says the nearest known one, and all of them.

    >>> print(unknown("method", "heterfl", ["fedavg", "heterofl"]))
    unknown method 'heterfl': did you mean 'heterofl'? Known: fedavg, heterofl
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    guess = f": did you mean {near[0]!r}? Known" if near else "; known"
    listed = ", ".join(names) if names else "none"
    return FedtailorError(f"unknown {kind} {name!r}{guess}: {listed}{hint}")


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Refuse ``value`` for ``field`` unless ``condition`` holds; ``expected`` says what would be right."""
    if not condition:
        raise FedtailorError(f"{field} = {value!r}: expected {expected}")
