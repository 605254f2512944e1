"""Runs over a real SuperLink: what the tests of it share."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from fedtailor.config import make_config
from fedtailor.flower.link import Link
from fedtailor.flower.local import LocalLink
from fedtailor.run.interface import run_config
from helpers import differing, final_weights


def parts(folder: Path, count: int) -> list[dict[str, object]]:
    """What nodes say of themselves that share a split among them."""
    return [
        {"partition-id": n, "num-partitions": count, "state": str(folder / f"client{n}")}
        for n in range(count)
    ]


def there(link: LocalLink) -> Link:
    """Where to send runs."""
    return Link(link.address, link.authority)


def run_here(text: str, folder: Path) -> None:
    """The run in process."""
    run_config(make_config(tomllib.loads(text)), folder, on_notice=lambda _: None)


def same(text: str, folder: Path) -> bool:
    """Whether a run has the bits of the run in process."""
    run_here(text, folder.with_name("here"))
    return not differing(final_weights(folder.with_name("here")), final_weights(folder))


def wait_until(ready: Callable[[], bool], seconds: float, what: str) -> None:
    """A wait that has a limit."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)


def rounds_in(folder: Path) -> int:
    """How many rounds a run has saved."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def server_processes(folder: Path) -> list[int]:
    """The processes that hold a run's lock open."""
    lock, found = str(folder / "run.lock"), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(each) == lock for each in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


class Command:
    """A command of fedtailor that runs beside the test; what it says goes to a file."""

    def __init__(self, log: Path, link: LocalLink, *words: str) -> None:
        self.log = log
        options = [
            "--engine",
            "flower",
            "--superlink",
            link.address,
            "--root-certificates",
            str(link.authority),
        ]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedtailor", *words, *options],
                env=link.environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """All of it."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def rounds(self) -> list[int]:
        """The rounds that it has reported."""
        return [int(number) for number in re.findall(r"^round (\d+)", self.said, re.MULTILINE)]

    def end(self, seconds: float) -> int:
        """Its exit status, once it has ended by itself."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(
                f"not at its end after {seconds:g} s; it says: {self.said[-2000:]}"
            ) from None

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
