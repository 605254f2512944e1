"""How the starting of workers goes: a pause after each that died too soon, and an end to it when none gets ready."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedtailor.engines.workers.luggage import NotPortable

LEAST_STARTS = 3  # that must have failed before it is given up
# ... and so long must none have become ready: a machine may be out of memory for a while.
PATIENCE_SECONDS = 120.0
# Seconds before the next start; doubled with every further one that fails.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0


class Starts:
    """The failed starts since a worker was last ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed, self._since, self._not_before = 0, 0.0, 0.0

    def may(self) -> bool:
        """Whether it is time to start another worker."""
        return self._clock() >= self._not_before

    def worked(self) -> None:
        """A worker is ready."""
        self._failed, self._not_before = 0, 0.0

    def failed(self, cause: str) -> None:
        """A worker ended before it was ready; ``NotPortable`` if that has gone on for too long."""
        now = self._clock()
        self._since = self._since if self._failed else now
        self._failed += 1
        self._not_before = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failed - 1))
        if self._failed >= LEAST_STARTS and now - self._since >= PATIENCE_SECONDS:
            raise NotPortable(
                f"{self._failed} worker processes in a row ended before they were ready, for {now - self._since:.0f} "
                f"seconds: {cause}"
            )
