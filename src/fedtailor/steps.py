"""What is being done at the moment, and how long it takes: said by whoever does it, heard by whoever shows it.

No result depends on it, and where nobody listens nothing is said or measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

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


# Where the time of a round goes. ``steps`` is what a client's training cannot do without: batches, forward, backward,
# optimiser.
Phase = Literal["select", "cut", "transfer", "train", "steps", "check", "merge", "evaluate", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)

T = TypeVar("T")
_NOTHING = nullcontext()


@dataclass
class Stopwatch:
    """Seconds by phase. A phase within another counts for itself alone, so that together they are the time that passed.

    >>> watch = Stopwatch()
    >>> with watch.phase("train"), watch.phase("steps"):
    ...     pass
    >>> sorted(watch.lap())
    ['steps', 'train']
    >>> watch.lap()
    {}
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[Phase, float] = field(default_factory=dict)
    workers: dict[int, dict[Phase, float]] = field(
        default_factory=dict
    )  # the same of other processes, by number
    _inner: list[float] = field(default_factory=list)  # of each open phase, what phases in it have taken

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the block's time for a phase."""
        started = self.clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = self.clock() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took

    def told(self, worker: int, seconds: dict[Phase, float]) -> None:
        """Take in what another process has measured."""
        known = self.workers.setdefault(worker, {})
        for name, took in seconds.items():
            known[name] = known.get(name, 0.0) + took

    def lap(self) -> dict[Phase, float]:
        """What this process has measured since it was asked last."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def lap_of_workers(self) -> dict[int, dict[Phase, float]]:
        """What others have."""
        workers, self.workers = self.workers, {}
        return workers


_watch: ContextVar[Stopwatch | None] = ContextVar("watch", default=None)


def phase(name: Phase) -> AbstractContextManager[None]:
    """Count the block's time for a phase, if somebody measures."""
    watch = _watch.get()
    return _NOTHING if watch is None else watch.phase(name)


def in_phase(name: Phase, items: Iterable[T]) -> Iterator[T]:
    """The same items; the time that each takes to come counts for a phase."""
    coming = iter(items)
    while True:
        with phase(name):
            try:
                item = next(coming)
            except StopIteration:
                return
        yield item


def stopwatch() -> Stopwatch | None:
    """Who measures, if anybody does."""
    return _watch.get()


@contextmanager
def measured_by(watch: Stopwatch) -> Iterator[None]:
    """Let the stopwatch run inside the block."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)
