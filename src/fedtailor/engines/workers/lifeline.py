"""A worker that outlives its parent would train for nobody: it dies with it, however the parent dies.

A worker is tied before it imports PyTorch, which takes half a minute on a busy machine; nothing here needs it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from fedtailor.engines.workers.shared_memory import SharedMemory

BEAT_SECONDS = 1.0  # how often a worker looks after its parent, and shows that it is there
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_BEAT = slice(0, 8)  # of the mailbox


def hold(mailbox: int, parent: int, by_signal: bool) -> None:
    """Tie this process to its parent, and beat where the parent can see it, in the mailbox behind a descriptor.

    The kernel kills the child of a dead *thread*, so it is asked only where that is the main one. A thread that looks
    every second does the same on systems that have no such signal.
    """
    if by_signal and sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a libc without prctl
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_beat, args=(parent, mailbox), daemon=True).start()


def _beat(parent: int, descriptor: int) -> None:
    mailbox = SharedMemory(descriptor=descriptor)
    count = 0
    while os.getppid() == parent:
        count += 1
        mailbox.view(1)[_BEAT] = count.to_bytes(8, "little")
        time.sleep(BEAT_SECONDS)
    os._exit(1)


def beat_of(mailbox: SharedMemory) -> int:
    """How often the worker has beaten."""
    return int.from_bytes(mailbox.view(1)[_BEAT], "little")
