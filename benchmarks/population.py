"""What a large population costs: set-up, memory, and a round of the same cohort out of 10^3, 10^5 and 10^6 devices.

    python benchmarks/population.py [--record]

Every population is a process of its own: two examples each, devices of the built-in table with a deadline and the
simulated clock, 100 clients a round that train a small network. Processes take turns; a round's time is that of the
processor, so that others on the machine count little. Memory is the growth of resident memory over the imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import results

POPULATIONS = (10**3, 10**5, 10**6)
EXAMPLES, COHORT, ROUNDS = 1000, 100, 12
SETTLED = 2  # rounds that are left out: the first ones fill caches


def main() -> None:
    """Measure in turns, or one population in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", type=int, metavar="CLIENTS", help="measure one population in this process")
    results.add_option(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    found: dict[int, list[dict[str, float]]] = {clients: [] for clients in POPULATIONS}
    for _ in range(options.turns):
        for clients, turns in found.items():
            command = [sys.executable, str(Path(__file__)), "--one", str(clients)]
            turns.append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    figures: dict[str, Any] = {
        f"{clients:,}": {name: round(median(turn[name] for turn in turns), 4) for name in turns[0]}
        for clients, turns in found.items()
    }
    base = figures[f"{POPULATIONS[0]:,}"]["round_ms"]
    for each in figures.values():
        each["round"] = round(each["round_ms"] / base, 3)
    results.report(f"{COHORT} clients a round", figures, options)


def measured(clients: int) -> dict[str, float]:
    """Set-up in seconds, rounds in milliseconds of the processor, and memory in MiB."""
    import numpy as np
    import torch

    from fedtailor.data.batches import Examples
    from fedtailor.data.federated import FederatedData
    from fedtailor.data.partitions import Partition
    from fedtailor.run.interface import train

    torch.manual_seed(0)
    torch.set_num_threads(1)
    examples = Examples.of(torch.randn(EXAMPLES, 32), torch.arange(EXAMPLES) % 4)
    partition = Partition(np.arange(2 * clients) % EXAMPLES, 2 * np.arange(clients + 1))
    data = FederatedData("many", examples, examples, partition, 4)
    network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    before = resident()
    began, ends = time.process_time(), []
    train(
        network, data, {"devices": "built-in", "deadline": "60s"}, "heterofl", rounds=ROUNDS,
        clients_per_round=COHORT, evaluate_every=ROUNDS, on_round=lambda _: ends.append(time.process_time()),
        engine={"workers": 0}, progress=False,
    )  # fmt: skip
    rounds = [after - start for start, after in pairwise(ends)][SETTLED:-1]
    first = ends[0] - began - median(rounds)
    return {
        "setup_s": first,
        "round_ms": 1e3 * median(rounds),
        "growth_mib": resident() - before,
    }


def resident() -> float:
    """The most that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
