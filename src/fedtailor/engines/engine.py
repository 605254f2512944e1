"""What an engine is: it maps ``perform`` over tasks and knows nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedtailor.round import Dropped, Task, Update


class Engine(Protocol):
    """Runs tasks; a client that fails is a value among the results, not an exception."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Dropped]:
        """One result per task, in any order."""
        ...
