"""Where clients run, and what becomes of a round when some of them do not answer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedtailor.errors import require

# The environment of processes that train; what the user has set comes first.
FOR_TRAINING = {
    # Training frees and asks for the same few megabytes in every step. By default glibc gives them back to the system
    # each time and gets them page by page: a quarter of the time of a small network, and half of what evaluation takes
    # where layers are large. These are its largest permitted values.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    # Methods that draw channels in every step run layers of ever new shapes. oneDNN makes a kernel for each of them and
    # keeps 1,024; if it keeps them all, UniProb and Flado train 1.3 times as fast, for at most 200 MB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16384",
}


@dataclass(frozen=True)
class EngineSettings:
    """The number of workers changes no result; the rest decides about clients that fail."""

    workers: int | Literal["auto"] = "auto"
    """Worker processes for the clients: auto takes all cores where that pays, 0 stays in this process."""
    deadline: float = 86_400.0
    """Seconds after which a round goes on without those that have not answered."""
    quorum: float = 0.25
    """The share of clients_per_round that must answer; below it a round is abandoned and tried again."""
    over_selection: float = 1.0
    """Ask so many times clients_per_round, so that enough are left when some drop out."""
    strikes: int = 3
    """A client whose updates were refused so often is not asked again in this run; 0 forgives everything."""
    retries: int = 3
    """How often an abandoned round is tried again, with other clients, before the run stops."""
    wait: float = 300.0
    """Seconds that a run on Flower waits for its first clients."""
    pause: float = 0.0
    """Seconds before the first retry; they double with every further one."""

    def __post_init__(self) -> None:
        fine = self.workers == "auto" or (isinstance(self.workers, int) and self.workers >= 0)
        require(fine, "engine.workers", self.workers, "auto, 0, or the number of processes")
        require(0 < self.deadline < math.inf, "engine.deadline", self.deadline, "seconds above 0")
        require(0 <= self.quorum <= 1, "engine.quorum", self.quorum, "a share from 0 to 1")
        asked = self.over_selection
        require(1 <= asked < math.inf, "engine.over_selection", asked, "at least 1, such as 1.3")
        require(self.strikes >= 0, "engine.strikes", self.strikes, "at least 0")
        require(self.retries >= 0, "engine.retries", self.retries, "at least 0")
        require(0 < self.wait < math.inf, "engine.wait", self.wait, "seconds above 0")
        require(0 <= self.pause < math.inf, "engine.pause", self.pause, "at least 0 seconds")


def available_cores() -> int:
    """How many cores this process may use: those that it is bound to, and no more than its container is allowed."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return bound
    return bound if allowed == "max" else max(1, min(bound, int(allowed) // int(period)))
