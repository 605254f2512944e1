"""One worker process as its parent sees it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import torch

from fedtailor.engines.settings import FOR_TRAINING
from fedtailor.engines.values import Tensors, Value
from fedtailor.engines.workers.jobs import Job
from fedtailor.engines.workers.lifeline import beat_of
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.engines.workers.shared_memory import SharedMemory, aligned
from fedtailor.engines.workers.worker import ANSWER, FAILED, READY, SIGNAL, START
from fedtailor.errors import FedtailorError
from fedtailor.steps import stopwatch
from fedtailor.storage.wire import DecodeError, decode, encode

# The path first: what follows may be found nowhere else. Then the lifeline: what follows imports PyTorch.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "mailbox, line, luggage, parent, by_signal = map(int, sys.argv[2:]); "
    "from fedtailor.engines.workers.lifeline import hold; hold(mailbox, parent, bool(by_signal)); "
    "from fedtailor.engines.workers.worker import main; main(mailbox, line, luggage)"
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


class WorkerProcess:
    """A child process, its mailbox, and the job that it is at."""

    def __init__(self, luggage: SharedMemory) -> None:
        self.job: Job | None = None
        self.ready = False
        self._number = 0
        self._tensors: Tensors | None = None  # what lies in the mailbox
        self._tensor_bytes = 0
        self._received = b""
        self._beat, self._silent = 0, 0.0
        self._seen = self._started = self._given = time.monotonic()
        self._mailbox = SharedMemory()
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        try:
            with theirs:
                self._process = _spawn(self._mailbox.descriptor, theirs.fileno(), luggage.descriptor)
        except OSError as error:  # too many processes, or no memory for one more
            self._line.close()
            self._mailbox.close()
            raise NotPortable(f"a worker process could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there is something to ``receive``."""
        return self._line.fileno()

    def give(self, job: Job) -> None:
        """Hand over a job; the worker must be idle."""
        if self._tensors is not job.tensors:  # statistics queries ask many clients about one patch
            end = self._mailbox.write(START, encode(job.tensors))
            self._tensors, self._tensor_bytes = job.tensors, end - START
        rest = aligned(START + self._tensor_bytes)
        end = self._mailbox.write(rest, encode(job.rest))
        self._number += 1
        self.job, self._given = job, time.monotonic()
        try:
            self._line.sendall(SIGNAL.pack(self._number, self._tensor_bytes, end - rest))
        except OSError as error:
            raise Died(str(error)) from error

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
        kind, start, size = SIGNAL.unpack(self._received)
        self._received = b""
        try:
            with self._mailbox.view(start + size) as view:
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
        if kind != ANSWER or self.job is None or value[0] != self._number:
            raise Died("it answered what was not asked")
        self.job = None
        if (watch := stopwatch()) is not None:
            watch.told(self.pid, value[2])
        return dict(value[1])

    def check_life(self) -> None:
        """Refuse a worker that takes too long to start or shows no life."""
        now = time.monotonic()
        # At most a second at a time: whoever was stopped together with this process has not been silent.
        self._silent += min(1.0, now - self._seen)
        self._seen = now
        beat = beat_of(self._mailbox)
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
        return together and time.monotonic() - self._given > BUNDLE_SECONDS

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
        self._line.close()
        self._mailbox.close()
        self._tensors = None

    def _blame(self, text: str) -> str:
        tasks = self.job.tasks if self.job is not None else ()
        clients = ", ".join(str(task.client.id) for task in tasks)
        return f"client {clients}, round {tasks[0].round}: {text}" if tasks else text


def _spawn(mailbox: int, line: int, luggage: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter: it shares nothing with this one but the three descriptors."""
    threads = str(torch.get_num_threads())
    in_main_thread = int(threading.current_thread() is threading.main_thread())
    numbers = [str(number) for number in (mailbox, line, luggage, os.getpid(), in_main_thread)]
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps([str(path) for path in sys.path]), *numbers],
        pass_fds=(mailbox, line, luggage),
        stdin=subprocess.DEVNULL,
        env={**FOR_TRAINING, **os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        process_group=0,  # Ctrl-C is for the parent, which decides what becomes of the round
    )
