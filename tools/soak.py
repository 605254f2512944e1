"""Everything at once, for a while: kills, stopped processes, full disks, and clients that raise, lie and never end.

    python tools/soak.py --minutes 20 [--seed 7]      # `make test-soak`

One run after the other, twelve methods in turn, each with two workers. While it goes on, its process or a worker is
killed (SIGKILL) or stopped for some seconds (SIGSTOP), or its disk is full; whatever ended is started again. In the end
its weights and scores must be those of its twin: one process, no disturbance, and the clients that were refused in a
round raise at once in that round of the twin. Every run is derived from the seed and its number. Linux only: a full
disk is a small tmpfs in a mount namespace of its own, or RLIMIT_FSIZE where nothing can be mounted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_runs import CLIENTS, LIES, ROUNDS, SETTINGS, ended

MOUNTED = "FEDTAILOR_SOAK_MOUNTS"  # set in the process that may mount
DISK = 24 * 2**20  # bytes of the small disk
MOST_SECONDS = 400.0  # of one run: then it hangs
DEATH_SECONDS = 120.0  # a worker that is just starting dies once PyTorch is imported
MOST_DISTURBANCES = 3  # of one run: then it may come to its end
FULL, TOO_FEW = 74, 69  # documented exit codes after which a run is resumed
COMPARED = ("round", "clients", "merged", "train_loss", "tiers", "best_round", "method")
WEIGHTS, METRICS = "weights.safetensors", "metrics.jsonl"

Spec = dict[str, Any]


class Fault(Exception):  # noqa: N818  (what is looked for)
    """What must not happen, in words."""


@dataclass
class Disk:
    """Where disturbed runs write; it can be full."""

    folder: Path
    mounted: bool

    def fill(self, pid: int) -> None:
        """No byte more."""
        if not self.mounted:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            return
        with (self.folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (2**20, 2**12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def empty(self) -> None:
        """Room again."""
        (self.folder / "ballast").unlink(missing_ok=True)


def small_disk(place: Path) -> Disk:
    """A tmpfs, if this process may mount one."""
    folder = place / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = MOUNTED in os.environ and subprocess.run(command, check=False).returncode == 0
    return Disk(folder, mounted)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text(encoding="ascii").split())
    return found


def alive(pid: int) -> bool:
    """Whether a process is there, and not only its name in the table."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] != "Z"


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def send(pid: int, number: int) -> None:
    """A signal, if there is still someone to get it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Child:
    """A run in a copy of this process, which has loaded everything already; its words go to a file."""

    spec: Spec
    log: Path
    pid: int = 0
    code: int | None = None

    def __post_init__(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                words = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(words, 1)
                os.dup2(words, 2)
                code = ended(self.spec)
            except BaseException:  # noqa: BLE001  (a traceback is what is looked for)
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def ended(self) -> bool:
        """Whether it has; then ``code`` says how."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def kill(self) -> None:
        """End it at once."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            until(self.ended, 60)

    def told(self) -> str:
        """Its last words."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return text[-1500:].strip()


@dataclass
class Disturbed:
    """A run with its troubles; ``counts`` says which there were."""

    spec: Spec
    disk: Disk
    draw: random.Random
    log: Path
    counts: Counter[str] = field(default_factory=Counter)

    def to_its_end(self) -> None:
        """Disturb it until it has ended; what stopped is started again."""
        end = time.monotonic() + MOST_SECONDS
        while not self.one_leg(end):
            pass

    def one_leg(self, end: float) -> bool:
        """From one start to what comes of it; whether it has come to its end."""
        child, filled = Child(self.spec, self.log), False
        try:
            while not until(child.ended, self.pause(child)):
                if time.monotonic() > end:
                    raise Fault(f"not at its end after {MOST_SECONDS:.0f} seconds: {child.told()}")
                if sum(self.counts.values()) < MOST_DISTURBANCES:
                    filled |= self.disturb(child)
        finally:
            self.disk.empty()
            workers = children(child.pid)
            child.kill()
            for each in workers:
                send(each, signal.SIGCONT)
        if child.code in (0, None):
            return True
        if child.code not in (-signal.SIGKILL, TOO_FEW) and not (child.code == FULL and filled):
            raise Fault(f"exit code {child.code}: {child.told()}")
        self.counts[{FULL: "full", TOO_FEW: "too few"}.get(child.code, "killed")] += 1
        return False

    def pause(self, child: Child) -> float:
        """Seconds to the next trouble; now and then it comes while workers are starting, as a rule afterwards."""
        before = self.rounds()
        if self.draw.random() < 0.8:
            until(lambda: child.ended() or self.rounds() > before, 60)
        return self.draw.uniform(0.1, 1.5)

    def rounds(self) -> int:
        """How many rounds are done."""
        file = Path(self.spec["folder"]) / METRICS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def disturb(self, child: Child) -> bool:
        """Something happens to it; whether its disk was full."""
        workers = children(child.pid)
        kind = self.draw.choice(["kill", "kill worker", "stop worker", "stop", "fill"])
        if kind == "kill":
            child.kill()
            if not until(lambda: not any(map(alive, workers)), DEATH_SECONDS):
                raise Fault("workers outlive the process that started them")
        elif kind == "fill":
            self.disk.fill(child.pid)
            until(child.ended, 6)
            self.disk.empty()
            return True
        elif kind == "stop" or workers:
            target = child.pid if kind == "stop" else self.draw.choice(workers)
            self.counts[kind] += 1
            if kind == "kill worker":
                send(target, signal.SIGKILL)
                return False
            send(target, signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.2, 3.0))
            send(target, signal.SIGCONT)
        return False


def specification(number: int, seed: int, folder: Path) -> Spec:
    """The run of a number: its method, and who misbehaves when."""
    draw = random.Random(f"{seed} {number}")
    method = list(SETTINGS)[number % len(SETTINGS)]
    habits: dict[str, str] = {}
    for round in range(ROUNDS):
        for client in draw.sample(range(CLIENTS), 5):
            habits[f"{client}:{round}"] = draw.choice(["raise", *LIES])
    if draw.random() < 0.5:
        habits[f"{draw.randrange(CLIENTS)}:{draw.randrange(ROUNDS)}"] = "slow"
    return {"folder": str(folder), "method": method, "habits": habits, "seed": number, "workers": 2}


def rows(folder: Path) -> list[dict[str, Any]]:
    """What the rounds left."""
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def refused(folder: Path) -> dict[str, str]:
    """Which clients were refused in which rounds, and why."""
    return {
        f"{client}:{row['round'] - 1}": next(iter(reasons))
        for row in rows(folder)
        for client, reasons in row.get("refused_by", {}).items()
    }


def twin(spec: Spec, place: Path) -> Path:
    """The same run without disturbance and without those who were refused."""
    habits = dict.fromkeys(refused(Path(spec["folder"])), "raise")
    child = Child({**spec, "folder": str(place / "twin"), "habits": habits, "workers": 0}, place / "twin.log")
    if not until(child.ended, MOST_SECONDS) or child.code:
        child.kill()
        raise Fault(f"its twin ended with exit code {child.code}: {child.told()}")
    return place / "twin"


def difference(one: Path, other: Path) -> str:
    """In what two runs differ; nothing if they do not."""
    for mine, theirs in zip(rows(one), rows(other), strict=True):
        for key in COMPARED:
            if mine.get(key) != theirs.get(key):
                return f"round {mine['round']}: {key} is {mine.get(key)} and {theirs.get(key)} in its twin"
    same = (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
    return "" if same else "other weights than its twin"


def soaked(number: int, seed: int, disk: Disk, place: Path) -> tuple[Counter[str], str]:
    """One run and its twin: what happened, and what is wrong."""
    spec = specification(number, seed, disk.folder / "run")
    run = Disturbed(spec, disk, random.Random(f"{seed} {number} trouble"), place / "run.log")
    try:
        run.to_its_end()
        reasons = refused(Path(spec["folder"]))
        run.counts["refused"] = len(reasons)
        run.counts["late"] = sum(reason in ("late", "worker-died") for reason in reasons.values())
        return run.counts, difference(Path(spec["folder"]), twin(spec, place))
    except Fault as fault:
        return run.counts, str(fault)
    finally:
        for name in ("run", "twin"):
            shutil.rmtree((disk.folder if name == "run" else place) / name, ignore_errors=True)
            (place / f"{name}.log").unlink(missing_ok=True)


COLUMNS = ("killed", "kill worker", "stop worker", "stop", "full", "too few", "refused", "late")


def table(found: dict[str, list[tuple[Counter[str], str]]]) -> str:
    """All methods: how many runs, their troubles, and how many equal their twins."""
    lines = [f"{'method':18}{'runs':>5}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'equal':>7}"]
    together = [each for runs in found.values() for each in runs]
    for method, runs in [*found.items(), ("all", together)]:
        sums = "".join(f"{sum(counts[name] for counts, _ in runs):12}" for name in COLUMNS)
        lines.append(f"{method:18}{len(runs):5}{sums}{sum(not wrong for _, wrong in runs):7}")
    return "\n".join(lines)


def main() -> int:
    """Runs until the time is over."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--minutes", type=float, default=20.0)
    options.add_argument(
        "--seed", type=int, default=None, help="of all runs; without it a new one, which is printed"
    )
    options.add_argument("--first", type=int, default=0, help="the number of the first run")
    chosen = options.parse_args()
    seed = random.randrange(10**6) if chosen.seed is None else chosen.seed
    found: dict[str, list[tuple[Counter[str], str]]] = {}
    end, number = time.monotonic() + 60 * chosen.minutes, chosen.first
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        disk = small_disk(Path(name))
        print(f"seed {seed}; a full disk is {'a tmpfs' if disk.mounted else 'RLIMIT_FSIZE'}", flush=True)
        while time.monotonic() < end:
            begin = time.monotonic()
            counts, wrong = soaked(number, seed, disk, Path(name))
            method = list(SETTINGS)[number % len(SETTINGS)]
            found.setdefault(method, []).append((counts, wrong))
            troubles = ", ".join(f"{counts[each]} {each}" for each in COLUMNS if counts[each])
            state = f"DIFFERS: {wrong}" if wrong else "equals its twin"
            print(
                f"{number:3} {method:18}{time.monotonic() - begin:6.1f} s  {state}  ({troubles})", flush=True
            )
            number += 1
        if disk.mounted:
            subprocess.run(["umount", str(disk.folder)], check=True)
    print(table(found))
    return int(any(wrong for runs in found.values() for _, wrong in runs))


if __name__ == "__main__":
    command = ["unshare", "--mount", "--", sys.executable, *sys.argv]
    able = shutil.which("unshare") and subprocess.run([*command[:3], "true"], check=False).returncode == 0
    if able and MOUNTED not in os.environ:
        os.execvpe(command[0], command, {**os.environ, MOUNTED: "1"})
    raise SystemExit(main())
