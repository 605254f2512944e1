"""Keeps a SuperNode (or a SuperLink) running: ``python -m fedtailor.flower.keeping flower-supernode ...``.

A SuperLink takes a node that was lost for connected until it has missed two heartbeats, 60 seconds in all, and lets
nobody in under its key meanwhile; a SuperNode that is not let in ends. So whoever is killed and started again at once
would stay away for good. Here it is started again until it is let in. Imports no PyTorch: it runs as long as the node.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PAUSE = 5.0  # seconds between an end and the next start
QUICK, MOST_QUICK = 10.0, 5  # seconds; a SuperLink that ends as soon as that so often in a row never listens
LINK = "superlink"
STOP_SECONDS = 10.0
WRONG_WORDS = 2  # how programs end that do not understand what they are asked


def keep(command: Sequence[str], pause: float = PAUSE) -> int:
    """Start a program again whenever it ends; until it is asked to end, or does not understand its options.

    A node is kept for good: whoever it waits for may come back. A SuperLink waits for nobody.
    """
    link, quick = LINK in Path(command[0]).name, 0
    while True:
        started = time.monotonic()
        process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL)
        try:
            code = process.wait()
            if code in (0, WRONG_WORDS):
                return code
            quick = quick + 1 if time.monotonic() - started < QUICK else 0
            ended = f"{command[0]} has ended (exit code {code})"
            if link and quick >= MOST_QUICK:
                print(f"{ended}, {quick} times at once: see above why; is its port taken?", flush=True)
                return code
            more = "" if link else " A SuperLink lets a node that was lost in again after 60 s."
            print(f"{ended}: starting it again in {pause:g} s.{more}", flush=True)
            time.sleep(pause)
        except KeyboardInterrupt:
            _end(process)
            return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    process.kill()
    process.wait()


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        # Also where a shell lets those in the background ignore them.
        signal.signal(number, _as_interrupt)
    sys.exit(keep(sys.argv[1:]))
