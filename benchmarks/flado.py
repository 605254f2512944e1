"""What Flado's parts cost: the transform, sparse steps against dense ones, and the alignment of a round.

    python benchmarks/flado.py [transform|steps|alignment ...] [--record]

Transform: 11 million numbers, processor seconds of one thread, and the growth of the resident set in a fresh process.
Steps: a client holds the whole network; each step draws, gathers, runs forward and backward, and writes back. Dense and
sparse steps alternate on one thread, so that a busy machine slows both; lower quartiles of wall time are compared.
Alignment: rounds of one client with alignment and without (UniProb) in turn, medians of processor time; estimates by
passes of their own are made in every round and counted for the share of the local steps that is the default.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Client
from fedtailor.methods.flado.aligning import ESTIMATORS
from fedtailor.methods.flado.alignment import trained_names
from fedtailor.methods.flado.flado import Flado
from fedtailor.methods.flado.sketch import Transform
from fedtailor.methods.flado.trajectory import SEED, SKETCH
from fedtailor.methods.uniprob import UniProb
from fedtailor.models import build_model
from fedtailor.seeds import Seeds

NUMBERS = 11_000_000
SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
LOCAL = LocalTraining(lr=0.01, batch_size=32)
EXAMPLES, REPEATS = 600, 21  # of a client; rounds that are measured
SHAPES = {"lenet5": (1, 28, 28), "vgg9": (3, 32, 32), "resnet18": (3, 32, 32)}


def network(name: str) -> ElasticModel:
    """A traced network of the paper."""
    torch.manual_seed(0)
    example = (torch.randn(2, *SHAPES[name]), torch.zeros(2, dtype=torch.int64))
    return elastic(build_model(name, input_shape=SHAPES[name], num_classes=10), example)


def measure_transform() -> dict[str, Any]:
    """Seconds, and memory over what the input takes, the input included."""
    vector = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    seconds = []
    for seed in range(5):
        started = time.process_time()
        Transform(NUMBERS, 1024, seed)([vector])
        seconds.append(time.process_time() - started)
    line = [sys.executable, __file__, "--memory"]
    grown = int(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    return {
        "numbers": NUMBERS,
        "rows": 1024,
        "seconds": [round(each, 3) for each in seconds],
        "memory_over_input": round(1 + grown / (4 * NUMBERS), 2),
    }


def transform_memory() -> int:
    """In a fresh process: the peak above what is resident with the input."""
    vector = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    Transform(NUMBERS, 1024, 1)([vector])
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def steps_at(model: ElasticModel, method: Flado, share: float) -> LocalSteps:
    """A client with a budget, at its uniform start."""
    client = Client(0, "tier", Budget(macs=share), 600)
    task = method.assign(method.init(model), client, model, Seeds(0))
    return LocalSteps(method, method.prepare(task, None, model), model)  # type: ignore[arg-type]


def measure_steps(name: str, repeats: int) -> dict[str, Any]:
    """Time against FLOPs: every share in turn, then again."""
    model, method = network(name), Flado(LOCAL)
    batch = (torch.randn(32, *SHAPES[name]), torch.arange(32) % 10)
    clients = {share: steps_at(model, method, share) for share in SHARES}
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    for step in range(repeats + 2):
        for share, client in clients.items():
            started = time.perf_counter()
            client.take(step, batch)
            if step >= 2:  # the first steps choose algorithms and fill caches
                seconds[share].append(time.perf_counter() - started)
    quartiles = {share: sorted(each)[len(each) // 4] for share, each in seconds.items()}
    means = {share: sum(each) / len(each) for share, each in seconds.items()}
    return {
        "network": name,
        "curve": [
            {
                "flops_share": share,
                "seconds": round(quartiles[share], 5),
                "faster_than_dense": round(quartiles[1.0] / quartiles[share], 2),
                "faster_on_average": round(means[1.0] / means[share], 2),
            }
            for share in SHARES
        ],
    }


def measure_alignment(name: str) -> list[dict[str, Any]]:
    """One client's rounds at a third of the FLOPs, with and without alignment at the default share, interleaved."""
    model = network(name)
    examples = Examples.of(torch.randn(EXAMPLES, *SHAPES[name]), torch.arange(EXAMPLES) % 10)
    client = Client(0, "tier", Budget(macs=0.34), EXAMPLES)
    steps, plain = LOCAL.steps_for(EXAMPLES), UniProb(LOCAL)
    rows = []
    for estimator in ESTIMATORS:
        # An estimate by passes is due in one of several rounds: a client with one in every round shows what it takes.
        often = 1.0 if estimator == "update" else 1 / steps
        method = Flado(LOCAL, estimator=estimator, alignment_share=often)  # type: ignore[arg-type]
        numbers = sum(model.weights()[each].numel() for each in trained_names(model))
        travelled = {SKETCH: torch.randn(min(method.sketch, numbers)), SEED: 1}
        with_it, without = list[float](), list[float]()
        for round in range(REPEATS + 1):
            # Rounds of their own: with the same draws, the second would find its kernels made.
            for at, (taken, each, memory) in enumerate(((with_it, method, travelled), (without, plain, {}))):
                state = replace(each.init(model), round=2 * round + at, memory=memory)
                task = each.assign(state, client, model, Seeds(0))
                started = time.process_time()
                each.perform(task, examples, model)
                taken.append(time.process_time() - started)
        share = 1.0 if estimator == "update" else Flado().alignment_share * steps
        more = statistics.median(with_it[1:]) / statistics.median(without[1:]) - 1
        default = Flado(LOCAL, estimator=estimator)  # type: ignore[arg-type]
        state = replace(default.init(model), memory=travelled)
        task = default.assign(state, client, model, Seeds(0))
        bare = plain.assign(plain.init(model), client, model, Seeds(0))
        counted = (
            default.work(task, model).macs / plain.work(plain.prepare(bare, examples, model), model).macs - 1
        )
        rows.append(
            {
                "network": name, "estimator": estimator, "steps_in_a_round": steps,
                "round_seconds": round_to(statistics.median(with_it[1:])),
                "uniprob_seconds": round_to(statistics.median(without[1:])),
                "overhead_seconds": round_to(more * share), "overhead_counted_macs": round_to(counted),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def round_to(value: float) -> float:
    """Three digits behind the point."""
    return float(f"{value:.3f}")


def main() -> None:
    """Measure what was named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("transform", "steps", "alignment")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="part", help=", ".join(parts))
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    results.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(transform_memory())
        return
    for part in options.parts or parts:
        if part == "transform":
            result: Any = measure_transform()
        elif part == "steps":
            result = [measure_steps(name, options.repeats) for name in ("lenet5", "vgg9", "resnet18")]
        else:
            result = measure_alignment("lenet5")
        results.report(part, result, options)


if __name__ == "__main__":
    main()
