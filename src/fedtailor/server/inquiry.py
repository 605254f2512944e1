"""Questions that clients answer without training.

They measure norm statistics (``calibrate``) or score their own networks (``evaluate``): forward passes, no backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.engines.protocol import Engine
from fedtailor.messages import Refused, Task, Update, marked
from fedtailor.record import Spent
from fedtailor.server.bytes_and_macs import asking_spent
from fedtailor.server.checking import check_answers
from fedtailor.server.setup import Setup


class Inquiry:
    """Asks clients through an engine, and keeps count of what could not be used and of what it cost."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup, self.engine = setup, engine
        self.refused: list[Refused] = []
        self.spent = Spent()
        self.sampled = 0  # clients that were asked for one thing, where these were not all

    def ask(self, tasks: Sequence[Task]) -> list[Update]:
        """The answers that can be used."""
        tasks = list(map(marked, tasks))
        updates, refused = check_answers(tasks, self.engine.run(tasks), self.setup.model)
        self.refused += refused
        self.spent += asking_spent(self.setup, tasks, updates)
        return updates
