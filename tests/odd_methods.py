"""Methods for tests of engines, in a file that worker processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedtailor.data.batches import Examples
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task, Update
from fedtailor.method import Method


@dataclass(frozen=True)
class Several(Method):
    """Many methods behind one, so that one pool of workers serves the tests of all: the tier says which is meant."""

    methods: Mapping[str, Method] = field(default_factory=dict)

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Update:
        name, _, tier = task.client.tier.partition("|")
        return self.methods[name].perform(replace(task, client=replace(task.client, tier=tier)), data, model)


@dataclass(frozen=True)
class As:
    """An engine that marks tasks as those of one method of ``Several``."""

    engine: Any
    name: str

    def run(self, tasks):
        marked = [replace(t, client=replace(t.client, tier=f"{self.name}|{t.client.tier}")) for t in tasks]
        yield from self.engine.run(marked)

    def measure(self, deployed, action="evaluate"):
        return self.engine.measure(deployed, action)

    def measure_aside(self, deployed, action="evaluate"):
        return self.engine.measure_aside(deployed, action)


@dataclass(frozen=True)
class Odd(Method):
    """Plain averaging, but clients do what a file tells them to: once, or whenever they are asked."""

    folder: str = ""

    def tell(self, habit: str, *, client: int = 2, again: bool = False) -> Method:
        """From now on a client has a habit."""
        (Path(self.folder) / "done").unlink(missing_ok=True)
        new = Path(self.folder) / "new"
        new.write_text(f"{client} {habit} {int(again)}", encoding="ascii")
        new.replace(Path(self.folder) / "habit")  # at once: clients may be reading it
        return self

    @property
    def times(self) -> int:
        """How often it has happened."""
        mark = Path(self.folder) / "done"
        return len(mark.read_text(encoding="ascii").splitlines()) if mark.exists() else 0

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        client, habit, again = (Path(self.folder) / "habit").read_text(encoding="ascii").split()
        if task.client.id == int(client) and (int(again) or not self.times):
            with (Path(self.folder) / "done").open("a", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
            getattr(self, f"_{habit}")()
        times = task.memory.get("times", 0)
        noise = task.memory.get("noise", torch.zeros(3)) + times
        return replace(task, memory={"times": times + 1, "noise": noise, "since": task.memory_round})

    def answer(self, task: Task, *rest: Any) -> Update:
        update = super().answer(task, *rest)
        wrong = (
            (Path(self.folder) / "habit").read_text(encoding="ascii").startswith(f"{task.client.id} impostor")
        )
        return replace(update, client=1) if wrong else update

    def _none(self) -> None:
        pass

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _late_kill(self) -> None:
        time.sleep(0.5)
        self._kill()

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _sleep(self) -> None:
        time.sleep(120)

    def _nap(self) -> None:
        time.sleep(1.5)

    def _raise(self) -> None:
        raise ZeroDivisionError("the user's own mistake")

    def _refuse(self) -> None:
        raise FedtailorError("training.lr = 3: expected less")

    def _exhaust(self) -> None:
        raise MemoryError

    def _impostor(self) -> None:
        pass  # see ``answer``
