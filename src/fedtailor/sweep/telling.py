"""What the runs of ``fedtailor.compare`` warn of: said once for all of them, at the user's line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO


@contextmanager
def told_once(here: str, caller: FrameType) -> Iterator[None]:
    """Warnings that point into the file ``here`` point at the line of the ``caller``; all are shown once.

    ``train`` warns at the line that called it, which is fedtailor's own where a comparison did, and every seed would
    say it anew. Filters stay those of the user.
    """
    place, show = (caller.f_code.co_filename, caller.f_lineno), warnings.showwarning
    told: set[tuple[str, str, int]] = set()

    def once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        filename, lineno = place if filename == here else (filename, lineno)
        known = (str(message), filename, lineno)
        if known not in told:
            told.add(known)
            show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = once
        yield
