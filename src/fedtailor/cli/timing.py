"""Where the time of a round goes: ``fedtailor run --profile``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.steps import PHASES, Phase, Stopwatch, measured_by

if TYPE_CHECKING:
    from fedtailor.record import RoundRecord

OTHER = "other"
MEANING: dict[str, str] = {
    "select": "who takes part",
    "cut": "pieces for clients",
    "transfer": "tasks and answers, between processes",
    "train": "clients beside their steps, or waiting",
    "steps": "training steps in this process",
    "check": "answers, before they are merged",
    "merge": "answers into the global model",
    "evaluate": "scores, or waiting for them",
    "save": "record and checkpoint",
    OTHER: "all else",
}


@dataclass(frozen=True)
class Lap:
    """One round: how long it took, what this process did in that time, and what its workers did."""

    seconds: float
    phases: Mapping[Phase, float]
    workers: Sequence[Mapping[Phase, float]]

    @property
    def shares(self) -> dict[str, float]:
        """Seconds by phase, with what is left of the round."""
        known: dict[str, float] = {name: self.phases.get(name, 0.0) for name in PHASES}
        return {**known, OTHER: max(0.0, self.seconds - sum(known.values()))}

    @property
    def steps(self) -> float:
        """Seconds of training steps, in all processes together."""
        return self.phases.get("steps", 0.0) + sum(each.get("steps", 0.0) for each in self.workers)

    @property
    def bare(self) -> float:
        """How long the round would take if there were nothing but these steps, evenly over the processes."""
        return self.steps / max(1, len(self.workers))


@dataclass
class Times:
    """The rounds of a run as they end."""

    watch: Stopwatch
    since: float
    laps: list[Lap] = field(default_factory=list)

    def note(self, _record: RoundRecord) -> None:
        """A round has ended."""
        now = time.perf_counter()
        self.laps.append(Lap(now - self.since, self.watch.lap(), list(self.watch.lap_of_workers().values())))
        self.since = now

    def value(self) -> dict[str, Any]:
        """Plain values: the first round, and the median of the others."""
        first, others = self.laps[:1], self.laps[1:]
        return {
            name: {
                "rounds": len(laps),
                "seconds": _median([lap.seconds for lap in laps]),
                "phases": {phase: _median([lap.shares[phase] for lap in laps]) for phase in (*PHASES, OTHER)},
                "processes": max(1, *(len(lap.workers) for lap in laps)),
                "steps": _median([lap.steps for lap in laps]),
                "times_bare_steps": _median([lap.seconds / lap.bare for lap in laps if lap.bare]),
            }
            for name, laps in (("first", first), ("others", others))
            if laps
        }

    def show(self, console: Console) -> None:
        """A table for a person, and a sentence on how far the run is from its bare steps."""
        value = self.value()
        if not value:
            return
        typical = value.get("others", value["first"])
        table = plain_table()
        table.add_column("phase")
        for head in ("first", "others", "share"):
            table.add_column(head, justify="right")
        table.add_column("")
        for phase, meaning in MEANING.items():
            took, whole = typical["phases"][phase], typical["seconds"]
            first = value["first"]["phases"][phase]
            table.add_row(phase, f"{first:.3f} s", f"{took:.3f} s", f"{took / whole:.0%}", meaning)
        caption = "others: the median of the rounds after the first; share: of such a round"
        console.print(Titled("Where the time of a round goes", table, caption))
        if typical["times_bare_steps"] is not None:
            count = typical["processes"]
            there = f"{count} worker processes" if count > 1 else "one process"
            console.print(
                f"A round takes {typical['seconds']:.3f} s, {typical['times_bare_steps']:.2f} times its bare "
                f"training steps ({typical['steps']:.3f} s of them, in {there}).",
                markup=False,
            )


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 6) if values else None


@contextmanager
def timed() -> Iterator[Times]:
    """Measure every round inside the block."""
    watch = Stopwatch()
    with measured_by(watch):
        yield Times(watch, time.perf_counter())
