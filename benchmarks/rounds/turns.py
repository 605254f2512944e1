"""A contestant is a process that does one round whenever it is told to, and says how many seconds that took.

Told by a line on its standard input; rounds before the first line are its own business (loading, starting, warming up).
"""

from __future__ import annotations

import sys
import time


class Turns:
    """One side of that conversation, for contestants that cannot be called but call back after every round."""

    def __init__(self) -> None:
        self._begun = 0.0

    def wait(self) -> bool:
        """Wait for the next turn; False when there is none."""
        if not sys.stdin.readline():
            return False
        self._begun = time.perf_counter()
        return True

    def done(self) -> None:
        """Say how long this turn took."""
        print(f"seconds {time.perf_counter() - self._begun}", flush=True)


def take_turns(round: object) -> None:
    """Do a round whenever it is asked for."""
    assert callable(round)
    turns = Turns()
    while turns.wait():
        round()
        turns.done()
