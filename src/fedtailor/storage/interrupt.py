"""Ctrl-C ends a run at the end of its round, not in the middle of one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
)  # Ctrl-C, and what batch systems send before they take the machine away


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop and has saved its last round."""

    def __init__(self, path: Path, round: int, number: int) -> None:
        super().__init__(f"stopped after round {round}, which is saved in {path}")
        self.path, self.round = path, round
        self.exit_code = 128 + number  # as the shell counts


@dataclass
class Request:
    """Whether someone asked to stop: the number of the signal, or 0."""

    number: int = 0


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Note the first signal instead of dying of it; the second one ends the process in the usual way.

    Python delivers signals to the main thread only, so a run on another thread is not protected.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}

    def note(number: int, _frame: FrameType | None) -> None:
        request.number = number
        for each, handler in before.items():
            signal.signal(each, handler)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nFinishing this round and saving it; once more to stop at once and lose it.\n")

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
