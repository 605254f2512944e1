"""One worker process as its parent sees it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from fedtailor.engines.settings import FOR_TRAINING
from fedtailor.engines.values import Tensors, Value
from fedtailor.engines.workers.jobs import Job
from fedtailor.engines.workers.lifeline import beat_of
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.engines.workers.shared_memory import SharedMemory, aligned
from fedtailor.engines.workers.worker import ANSWER, FAILED, MAILBOXES, READY, SIGNAL, START, WITHDRAWN
from fedtailor.errors import FedtailorError
from fedtailor.steps import stopwatch
from fedtailor.storage.wire import DecodeError, decode, encode

# The path first: what follows may be found nowhere else. Then the lifeline: what follows imports PyTorch.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "line, luggage, parent, by_signal, *mailboxes = map(int, sys.argv[2:]); "
    "from fedtailor.engines.workers.lifeline import hold; hold(mailboxes[0], parent, bool(by_signal)); "
    "from fedtailor.engines.workers.worker import main; main(mailboxes, line, luggage)"
)
START_SECONDS = 300.0  # importing PyTorch takes one or two on an idle machine
SILENCE_SECONDS = 300.0  # a worker that shows no life for so long is stopped or stuck
BUNDLE_SECONDS = 3.0  # tiny tasks together take milliseconds
REAP_SECONDS = 10.0
LAST_WORDS_SECONDS = 1.0


class Died(Exception):  # noqa: N818  (what happened to the worker)
    """The worker is gone or of no more use."""


class WorkerFailed(FedtailorError):  # noqa: N818
    """The code that a worker ran raised an error; the message holds its traceback."""


class Mailbox:
    """Where a job is put for a worker, which leaves its answer behind it."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self.tensors: Tensors | None = None  # what lies in it
        self._tensor_bytes = 0

    def put(self, job: Job) -> tuple[int, int]:
        """Write what is not there yet; returns the bytes of the tensors and of the rest."""
        if self.tensors is not job.tensors:  # statistics queries ask many clients about one patch
            self.tensors = None
            self._tensor_bytes = self.memory.write(START, encode(job.tensors)) - START
            self.tensors = job.tensors
        rest = aligned(START + self._tensor_bytes)
        return self._tensor_bytes, self.memory.write(rest, encode(job.rest)) - rest


@dataclass(frozen=True)
class Given:
    """A job that a worker has not answered yet."""

    job: Job
    number: int
    mailbox: int
    withdrawn: bool = False  # nobody waits for the answer


class WorkerProcess:
    """A child process, its mailboxes, the job that it is at, and the one that waits behind that."""

    def __init__(self, luggage: SharedMemory) -> None:
        self.ready = False
        self._given: list[Given] = []  # in their order
        self._number = 0
        self._received = b""
        self._beat, self._silent = 0, 0.0
        self._seen = self._started = self._begun = time.monotonic()
        self._mailboxes = [Mailbox() for _ in range(MAILBOXES)]
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        try:
            with theirs:
                self._process = _spawn(self._memories, theirs.fileno(), luggage.descriptor)
        except OSError as error:  # too many processes, or no memory for one more
            self._close()
            raise NotPortable(f"a worker process could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there is something to ``receive``."""
        return self._line.fileno()

    @property
    def busy(self) -> bool:
        """Whether there is an answer to come."""
        return bool(self._given)

    @property
    def full(self) -> bool:
        """Whether there is no mailbox for one more job; also while one that was withdrawn lies there."""
        return len(self._given) == MAILBOXES

    @property
    def job(self) -> Job | None:
        """What the worker is at."""
        return self._given_at(0)

    @property
    def waiting(self) -> Job | None:
        """What it does next; it has not begun with that."""
        return self._given_at(1)

    def _given_at(self, place: int) -> Job | None:
        given = self._given[place:][:1]
        return given[0].job if given and not given[0].withdrawn else None

    def give(self, job: Job) -> None:
        """Hand over a job. The worker, which must not be full, begins at once or after the job that it is at."""
        place = self._free_for(job)
        sizes = self._mailboxes[place].put(job)
        self._number += 1
        try:
            self._line.sendall(SIGNAL.pack(self._number, place, *sizes))
        except OSError as error:
            raise Died(str(error)) from error
        if not self._given:
            self._begun = time.monotonic()
        self._given.append(Given(job, self._number, place))

    def withdraw(self) -> Job:
        """Take back the job that waits. Should the worker begin with it just now, nobody listens to the answer."""
        waiting = self._given[1]
        self._memories[0].view(1)[WITHDRAWN] = waiting.number.to_bytes(8, "little")
        self._given[1] = replace(waiting, withdrawn=True)
        return waiting.job

    def _free_for(self, job: Job) -> int:
        """A mailbox that no job is in: one that holds the tensors, or the first.

        So what is too large to wait never lies in the second.
        """
        taken = {each.mailbox for each in self._given}
        free = [place for place in range(MAILBOXES) if place not in taken]
        return min(free, key=lambda place: self._mailboxes[place].tensors is not job.tensors)

    def receive(self) -> Value | None:
        """What came of the job, or None if nothing has yet. Does not wait."""
        try:
            more = self._line.recv(SIGNAL.size - len(self._received))
        except BlockingIOError:
            return None
        except OSError as error:
            raise Died(str(error)) from error
        if not more:
            raise Died("it hung up")
        self._received += more
        if len(self._received) < SIGNAL.size:
            return None
        kind, place, start, size = SIGNAL.unpack(self._received)
        self._received = b""
        try:
            with self._mailboxes[place].memory.view(start + size) as view:
                value = decode(view[start : start + size])
        except DecodeError as error:
            raise Died(f"its answer cannot be read: {error}") from error
        if kind == FAILED and not self.ready:
            raise NotPortable(f"a worker process could not start:\n{value}")
        if kind == FAILED:
            raise WorkerFailed(self._blame(str(value)))
        if kind == READY:
            self.ready = True
            return None
        if kind != ANSWER or not self._given or value[0] != self._given[0].number:
            raise Died("it answered what was not asked")
        answered = self._given.pop(0)
        self._begun = time.monotonic()  # with the job that waited
        if (watch := stopwatch()) is not None:
            watch.told(self.pid, value[2])
        return None if answered.withdrawn else dict(value[1])

    def check_life(self) -> None:
        """Refuse a worker that takes too long to start or shows no life."""
        now = time.monotonic()
        # At most a second at a time: whoever was stopped together with this process has not been silent.
        self._silent += min(1.0, now - self._seen)
        self._seen = now
        beat = beat_of(self._memories[0])
        if beat != self._beat:
            self._beat, self._silent = beat, 0.0
        if not self.ready and now - self._started > START_SECONDS:
            raise Died(f"it did not start within {START_SECONDS:.0f} seconds")
        if self.ready and self._silent > SILENCE_SECONDS:
            raise Died(f"it showed no life for {SILENCE_SECONDS:.0f} seconds")

    @property
    def dawdles(self) -> bool:
        """Whether tasks that were tiny enough to go together take so long that the others should not wait for one."""
        together = self.job is not None and len(self.job.tasks) > 1
        return together and time.monotonic() - self._begun > BUNDLE_SECONDS

    def cause(self) -> str:
        """How a process ended that has hung up; it may take a moment until the system knows."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(LAST_WORDS_SECONDS)
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        return "still running"

    def end(self) -> None:
        """Kill the process and give everything back."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a disk dies later, by itself
            self._process.wait(REAP_SECONDS)
        self._close()

    @property
    def _memories(self) -> list[SharedMemory]:
        return [each.memory for each in self._mailboxes]

    def _close(self) -> None:
        self._line.close()
        for each in self._mailboxes:
            each.memory.close()
            each.tensors = None

    def _blame(self, text: str) -> str:
        tasks = self.job.tasks if self.job is not None else ()
        clients = ", ".join(str(task.client.id) for task in tasks)
        return f"client {clients}, round {tasks[0].round}: {text}" if tasks else text


def _spawn(mailboxes: Sequence[SharedMemory], line: int, luggage: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter: it shares nothing with this one but these descriptors."""
    threads = str(torch.get_num_threads())
    in_main_thread = int(threading.current_thread() is threading.main_thread())
    boxes = [each.descriptor for each in mailboxes]
    numbers = [str(number) for number in (line, luggage, os.getpid(), in_main_thread, *boxes)]
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps([str(path) for path in sys.path]), *numbers],
        pass_fds=(*boxes, line, luggage),
        stdin=subprocess.DEVNULL,
        env={**FOR_TRAINING, **os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        process_group=0,  # Ctrl-C is for the parent, which decides what becomes of the round
    )
