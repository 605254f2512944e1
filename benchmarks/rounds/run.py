"""Rounds of fedtailor beside the limit and the peers, interleaved: ``make bench``.

    python benchmarks/rounds/run.py [--peers PYTHON] [--passes 9] [--only W1 W4] [--record]

Every contestant is a process of its own that does a round whenever it is told to; turns go round and round, so that
whatever else the machine does meets all of them. Of each the lower quartile counts. A ratio whose contestants vary by
more than ``MOST_SPREAD`` is not shown. With --peers, a Python that has pfl and Flower's simulation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import results  # noqa: E402  (lies in the folder above)
from workloads import WORKLOADS  # noqa: E402

from fedtailor.engines.settings import FOR_TRAINING  # noqa: E402

TURN_SECONDS = 1.0  # of rounds that count
MOST_SPREAD = 0.25  # between the quartiles, of the median
LIMIT = "bare steps"
MERGING = "W6"
ABOUT = {name: each.about for name, each in WORKLOADS.items()} | {
    MERGING: "merge of 100 updates of ResNet-18 in five tiers"
}
THREADS_OF_A_LOOP = {"W4": 1}  # tiny steps are slower on two


@dataclass
class Contestant:
    """A process that takes turns."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Start it; the first turn waits until it is ready."""
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def turn(self, counts: bool) -> None:
        """Rounds for a while; the first finds caches and cores as others have left them, and does not count."""
        self._round()
        spent: list[float] = []
        while not spent or (counts and sum(spent) < TURN_SECONDS):
            spent.append(self._round())
        self.seconds += spent if counts else []

    def _round(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        sys.exit(f"{self.name} ended without a word: {' '.join(self.command)}")

    def stop(self) -> None:
        """It ends when nobody can tell it to go on."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    @property
    def figures(self) -> dict[str, float]:
        """The lower quartile, the median, and how far the quartiles are apart, as a share of the median."""
        low, median, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return {"lower_quartile": low, "median": median, "spread": (high - low) / median}


def contestants(name: str, peers: str | None) -> list[Contestant]:
    """Who takes part in a workload; the first is what the others are compared with."""

    def script(file: str, *words: str, python: str = sys.executable) -> list[str]:
        return [python, str(HERE / file), name, *words]

    if name == MERGING:
        kinds = {"additions in place": "add", "fedtailor": "merge"}
        return [
            Contestant(who, [sys.executable, str(HERE / "merging.py"), kind], dict(FOR_TRAINING))
            for who, kind in kinds.items()
        ]
    threads = str(THREADS_OF_A_LOOP.get(name, 2))
    found = [
        Contestant(LIMIT, script("bare.py"), dict(FOR_TRAINING)),
        Contestant("fedtailor", script("ours.py")),
    ]
    if not WORKLOADS[name].nested:  # nobody writes FjORD first
        found.append(Contestant("plain loop", script("plain.py"), {"OMP_NUM_THREADS": threads}))
    if name == "W2":
        found.insert(2, Contestant("fedtailor, align = auto", script("ours.py", "align=auto")))
    if name == "W4":
        found.insert(2, Contestant("fedtailor, together = 50", script("ours.py", "together=50")))
    if peers and len(WORKLOADS[name].widths) == 1 and not WORKLOADS[name].adamw:
        found.append(Contestant("pfl", script("peers/pfl_rounds.py", python=peers)))
        found.append(Contestant("Flower's simulation", script("peers/flower_rounds.py", python=peers)))
    return found


def measure(name: str, passes: int, peers: str | None) -> list[Contestant]:
    """All contestants of a workload, pass by pass."""
    found = contestants(name, peers)
    try:
        for contestant in found:
            contestant.start()
            contestant.turn(counts=False)
        for _ in range(passes):
            for contestant in found:
                contestant.turn(counts=True)
    finally:
        for contestant in found:
            if hasattr(contestant, "process"):
                contestant.stop()
    return found


def table(name: str, found: list[Contestant]) -> list[str]:
    """Seconds, spread, and the ratio to the limit where it can be told."""
    limit = found[0].figures
    lines = [
        f"\n{name}: {ABOUT[name]}",
        f"{'':28}{'seconds':>9}{'spread':>9}{'times the first':>18}",
    ]
    for each in found:
        figures = each.figures
        steady = max(figures["spread"], limit["spread"]) <= MOST_SPREAD
        ratio = f"{figures['lower_quartile'] / limit['lower_quartile']:.2f}" if steady else "too noisy"
        lines.append(f"{each.name:28}{figures['lower_quartile']:9.3f}{figures['spread']:9.0%}{ratio:>18}")
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has pfl and flwr[simulation]")
    parser.add_argument("--passes", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--only", nargs="+", choices=sorted(ABOUT), default=sorted(ABOUT), metavar="W")
    results.add_option(parser)
    options = parser.parse_args()
    figures = {}
    for name in options.only:
        found = measure(name, options.passes, options.peers)
        print("\n".join(table(name, found)), flush=True)
        figures[name] = {each.name: each.figures for each in found}
    results.report("rounds", figures, options)


if __name__ == "__main__":
    main()
