"""What is being done at the moment: said by whoever does it, heard by whoever shows it.

No result depends on it, and where nobody listens nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

OnStep = Callable[[str], None]

TRAINING = "training"  # what a run does when it does nothing else
WAITING = "waiting for clients"  # how what a run on Flower does before its first round begins

_listener: ContextVar[OnStep | None] = ContextVar("listener", default=None)

OnNotice = Callable[[str], None]  # is told in a sentence what a user should know


def step(text: str) -> None:
    """Say what is being done from now on.

    >>> with heard_by(print):
    ...     step("reading data: digits")
    reading data: digits
    >>> step("nobody hears this")
    """
    listener = _listener.get()
    if listener is not None:
        listener(text)


@contextmanager
def heard_by(listener: OnStep) -> Iterator[None]:
    """Tell ``listener`` every step inside the block."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
