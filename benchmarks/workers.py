"""Measure the worker pool.

    python benchmarks/workers.py speed               # rounds per second of 0, 1 and 2 workers, interleaved
    python benchmarks/workers.py memory              # growth of memory, descriptors, threads over 1,000 rounds
    python benchmarks/workers.py handover            # what giving a ResNet-18 to a worker and taking it back costs

Run with OMP_NUM_THREADS=1, as clients train. Fashion-MNIST is looked for in FEDTAILOR_DATA. --record writes the figures
down.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch

from fedtailor.data import DataSettings, Examples, FederatedData, federate, load_dataset
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.protocol import Engine
from fedtailor.engines.settings import EngineSettings
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.fleet import fleet_by_name
from fedtailor.messages import Client, Task
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.models import build_model
from fedtailor.record import RoundRecord
from fedtailor.seeds import Seeds
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings, Setup

MEBIBYTE = 2**20


def fashion_mnist() -> tuple[ElasticModel, FederatedData]:
    """100 clients with 600 images each; two 5x5 convolutions of 16 and 32 channels and a layer of 128."""
    seeds = Seeds(0)
    settings = DataSettings(dataset="fashion-mnist", clients=100, partition="iid")
    data = federate(load_dataset("fashion-mnist"), settings, seeds)
    with seeds.scope("model"):
        module = build_model(
            "mnist-cnn", input_shape=(1, 28, 28), num_classes=10, channels=(16, 32), hidden=128
        )
    return elastic(module, data.example()), data


def rounds_of(
    engine: Engine, method: Method, model: ElasticModel, data: FederatedData, fleet: str, rounds: int
) -> list[float]:
    """Seconds of each round without evaluation: the last round, which is evaluated, is left out."""
    records: list[RoundRecord] = []
    settings = RoundSettings(rounds + 1, 10, rounds + 1, engine=EngineSettings(workers=0))
    setup = Setup.of(method, model, data, fleet_by_name(fleet), settings, Seeds(0)).settled()
    run_rounds(setup, engine, lambda record, _at: records.append(record))
    assert all(record.cohort.merged == 10 for record in records)
    return [record.seconds for record in records[:rounds]]


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time of some processes, which other work on the machine does not stretch much."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # in user mode and in the kernel
    return total / ticks


def measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds per second: medians over repeats that take turns, so that all see the same load."""
    model, data = fashion_mnist()
    method = get_method(arguments.method)()
    data = with_small_test(data)
    seconds: dict[int, list[float]] = {count: [] for count in arguments.workers}
    serial: list[float] = []
    parallel: list[float] = []
    loads = [os.getloadavg()[0]]
    with ExitStack() as stack:
        engines: dict[int, Any] = {}
        for count in arguments.workers:
            engine = WorkerPool(method, model, data, count) if count else InProcess(method, model, data)
            engines[count] = stack.enter_context(engine) if isinstance(engine, WorkerPool) else engine
        for engine in engines.values():
            rounds_of(engine, method, model, data, arguments.fleet, 1)
        for _ in range(arguments.repeats):
            for count, engine in engines.items():
                pids = engine.pids if count else []
                before = time.process_time(), cpu_seconds(pids)
                seconds[count] += rounds_of(engine, method, model, data, arguments.fleet, arguments.rounds)
                if count:
                    serial.append((time.process_time() - before[0]) / (arguments.rounds + 1))
                    parallel.append((cpu_seconds(pids) - before[1]) / (arguments.rounds + 1))
            loads.append(os.getloadavg()[0])
    rates = {count: 1 / statistics.median(values) for count, values in seconds.items()}
    ahead, behind = statistics.median(serial), statistics.median(parallel)
    return {
        "setting": "Fashion-MNIST, conv5-16, conv5-32, FC128; 100 clients x 600 images, 10 per round, batch 32",
        "method": arguments.method,
        "fleet": arguments.fleet,
        "rounds_measured": {str(count): len(values) for count, values in seconds.items()},
        "median_rounds_per_second": {str(count): round(rate, 4) for count, rate in rates.items()},
        "best_rounds_per_second": {str(c): round(1 / min(values), 4) for c, values in seconds.items()},
        "two_workers_over_one": round(rates[2] / rates[1], 3) if {1, 2} <= rates.keys() else None,
        "cpu_seconds_per_round_in_the_parent": round(ahead, 4),
        "cpu_seconds_per_round_in_workers": round(behind, 4),
        "two_workers_over_one_by_cpu_time": round((ahead + behind) / (ahead + behind / 2), 3),
        "load_average_seen": [round(min(loads), 2), round(max(loads), 2)],
        "cores": os.cpu_count(),
    }


def with_small_test(data: FederatedData) -> FederatedData:
    """The same data with few test examples: what is measured is training."""
    return replace(data, test=data.test.subset(list(range(256))))


def small_run() -> tuple[Method, ElasticModel, FederatedData]:
    """A round of some milliseconds."""
    generator = torch.Generator().manual_seed(0)
    examples = Examples.of(torch.randn(80, 1, 8, 8, generator=generator), torch.arange(80) % 4)
    parts = [list(range(first, first + 10)) for first in range(0, 80, 10)]
    data = FederatedData.from_examples(examples, examples, parts=parts, num_classes=4)
    with Seeds(0).scope("model"):
        module = build_model("cnn", input_shape=(1, 8, 8), num_classes=4, channels=(4, 8))
    return get_method("heterofl")(), elastic(module, data.example()), data


def memory_of(pid: int) -> float:
    """Resident MiB that belong to the process alone or were written by it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    kibibytes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return kibibytes["Rss:"] / 1024


def counts_of(pid: int) -> tuple[int, int]:
    """Open descriptors and threads."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Memory, descriptors and threads of the parent and two workers over many small rounds."""
    method, model, data = small_run()
    samples: list[dict[str, Any]] = []
    with WorkerPool(method, model, data, 2) as pool:

        def look(record: RoundRecord, _at: object) -> None:
            if record.round % arguments.every == 0:
                gc.collect()
                pids = [os.getpid(), *sorted(pool.pids)]
                samples.append(
                    {
                        "round": record.round,
                        "mebibytes": [round(memory_of(pid), 2) for pid in pids],
                        "descriptors_and_threads": [counts_of(pid) for pid in pids],
                    }
                )

        settings = RoundSettings(arguments.rounds, 4, 10)
        started = time.monotonic()
        setup = Setup.of(method, model, data, fleet_by_name("uniform-2"), settings, Seeds(0)).settled()
        run_rounds(setup, pool, look)
        seconds = time.monotonic() - started
    first = next(sample for sample in samples if sample["round"] >= 100)
    growth = [
        round(last - start, 2)
        for start, last in zip(first["mebibytes"], samples[-1]["mebibytes"], strict=True)
    ]
    return {
        "setting": "8 clients, 4 per round, small CNN with batch norm, HeteroFL, evaluated every 10 rounds, 2 workers",
        "rounds": arguments.rounds,
        "seconds": round(seconds, 1),
        "growth_in_mebibytes_after_round_100": {"parent": growth[0], "workers": growth[1:]},
        "limit_in_mebibytes": 10,
        "descriptors_and_threads_at_first_and_last": [
            first["descriptors_and_threads"], samples[-1]["descriptors_and_threads"],
        ],
        "peak_of_the_parent_in_mebibytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }  # fmt: skip


def measure_handover(arguments: argparse.Namespace) -> dict[str, Any]:
    """A task that does nothing with a ResNet-18: sending 45 MB, reading, writing and taking them back."""
    with Seeds(0).scope("model"):
        module = build_model("resnet18", input_shape=(3, 32, 32), num_classes=10)
    images = torch.randint(
        0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    examples = Examples.of(images.float() / 255, torch.arange(40) % 10)
    data = FederatedData.from_examples(examples, examples, parts=[list(range(40))], num_classes=10)
    model = elastic(module, data.example())
    method = Idle()
    state = method.init(model)
    client = Client(0, "1", fleet_by_name("equal").tiers[0].budget, 40)
    seconds: dict[str, list[float]] = {"here": [], "worker": []}
    with WorkerPool(method, model, data, 1) as pool:
        for _ in range(arguments.repeats + 1):
            for name, engine in (("here", InProcess(method, model, data)), ("worker", pool)):
                task: Task = method.assign(state, client, model, Seeds(0))
                started = time.perf_counter()
                assert sum(answer is not None for answer in engine.run([task])) == 1
                seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "bytes": sum(value.numel() * value.element_size() for value in state.weights.values()),
        "median_seconds_there_and_back": round(median["worker"] - median["here"], 4),
        "repeats": arguments.repeats,
    }


class Idle(get_method("fedavg")):  # type: ignore[misc]
    """FedAvg whose clients send back what they were sent."""

    def perform(self, task: Task, data: Examples, model: ElasticModel) -> Any:  # noqa: ARG002
        """No training."""
        return self.answer(task, task.patch, len(data))


MEASURES = {"speed": measure_speed, "memory": measure_memory, "handover": measure_handover}


def main() -> None:
    """Measure what was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--fleet", default="equal")
    results.add_option(parser)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1000 if arguments.measure == "memory" else 3)
    torch.set_num_threads(1)
    results.report(arguments.measure, MEASURES[arguments.measure](arguments), arguments)


if __name__ == "__main__":
    main()
