"""How long do tracing and cutting take? And how much of the networks can shrink?

    python benchmarks/cutting.py [--record]

Tracing is timed in fresh processes, self-check included. A warm cut of ResNet-18 is compared with cloning the same
tensors one by one: each kind of cut alternates with the clone (and with nothing else, because a third work between them
would empty the caches for the one that follows it), and the median of the rounds' ratios is reported. Times of cuts are
those of the processor, not of the clock: one thread does the work, and other programs should not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import results

TRACED = "resnet50"
CUT = "resnet18"
WIDTHS = ("1/4", "1/2")
WARM_UP = 5  # rounds
LIMITS = {"trace_seconds": 2.0, "prefix_ratio": 2.0, "random_ratio": 12.0, "elastic_share": 0.95}
SHARES = ("resnet18", "resnet50", "mobilenetv2", "char-lstm", "vit", "transformer")


def main() -> int:
    """Measure everything, or trace once in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5, help="processes that trace (default: 5)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of cutting (default: 100)")
    parser.add_argument("--trace", action="store_true", help="trace once in this process")
    results.add_option(parser)
    options = parser.parse_args()
    if options.trace:
        print(json.dumps(traced_once()))
        return 0
    results.report("tracing", tracing(options.repeats), options)
    results.report("cutting", cutting(options.rounds), options)
    results.report("shares", shares(), options)
    return 0


def tracing(repeats: int) -> dict[str, Any]:
    """The time of ``elastic(ResNet-50)`` for a CIFAR batch, each in a process of its own."""
    command = [sys.executable, __file__, "--trace"]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    wall = sorted(run["first_seconds"] for run in runs)
    return {
        "model": TRACED,
        "limit_seconds": LIMITS["trace_seconds"],
        "first_seconds": wall,
        "first_seconds_median": statistics.median(wall),
        "first_processor_seconds_median": statistics.median(run["first_processor_seconds"] for run in runs),
        "second_seconds_median": statistics.median(run["second_seconds"] for run in runs),
        "within": statistics.median(wall) < LIMITS["trace_seconds"],
        "processes": repeats,
    }


def traced_once() -> dict[str, float]:
    """The first and the second trace in this process."""
    import torch

    from fedtailor.elasticity.front_door import elastic
    from fedtailor.models import build_model

    torch.set_num_threads(1)
    module = build_model(TRACED, input_shape=(3, 32, 32), num_classes=10)
    batch = (torch.randn(16, 3, 32, 32), torch.arange(16) % 10)
    result: dict[str, float] = {}
    for which in ("first", "second"):
        wall, processor = time.perf_counter(), time.process_time()
        elastic(module, batch)
        result[f"{which}_seconds"] = round(time.perf_counter() - wall, 3)
        result[f"{which}_processor_seconds"] = round(time.process_time() - processor, 3)
    return result


def cutting(rounds: int) -> dict[str, Any]:
    """Prefix and random cuts of ResNet-18, warm, against clones of the same tensors."""
    import numpy as np
    import torch

    from fedtailor.elasticity.cutting.selections import prefix, random_units
    from fedtailor.elasticity.front_door import elastic
    from fedtailor.models import build_model

    torch.set_num_threads(1)
    module = build_model(CUT, input_shape=(3, 32, 32), num_classes=10)
    model = elastic(module, (torch.randn(2, 3, 32, 32), torch.tensor([0, 1])))
    weights = model.weights()
    cases: dict[str, Any] = {}
    for width in WIDTHS:
        ordered = prefix(model.groups, Fraction(width))
        drawn = random_units(model.groups, ordered, lambda _group: np.random.default_rng(0))
        held = model.cut(weights, ordered).values
        model.cut(weights, drawn)
        case: dict[str, Any] = {
            "tensors": len(held),
            "megabytes": round(sum(value.nbytes for value in held.values()) / 1e6, 2),
        }
        for kind, cut in {"prefix": ordered, "random": drawn}.items():
            clones, cuts = in_turn(rounds, partial(cloned, held), partial(model.cut, weights, cut))
            case[f"{kind}_milliseconds_median"] = round(1e3 * statistics.median(cuts), 3)
            case[f"clone_beside_{kind}_milliseconds_median"] = round(1e3 * statistics.median(clones), 3)
            case[f"{kind}_ratio_median"] = ratio(cuts, clones)
        cases[width] = case
    return {
        "model": CUT,
        "rounds": rounds,
        "limits": {"prefix": LIMITS["prefix_ratio"], "random": LIMITS["random_ratio"]},
        "widths": cases,
        "within": all(
            case["prefix_ratio_median"] <= LIMITS["prefix_ratio"]
            and case["random_ratio_median"] <= LIMITS["random_ratio"]
            for case in cases.values()
        ),
    }


def cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor copied by itself."""
    return {name: value.clone() for name, value in values.items()}


def in_turn(rounds: int, *works: Callable[[], object]) -> list[list[float]]:
    """Processor seconds of each work, all of them in every round, after a few rounds of warming up."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + WARM_UP):
        for work, taken in zip(works, times, strict=True):
            started = time.thread_time()
            made = work()
            taken.append(time.thread_time() - started)
            del made
    return [taken[WARM_UP:] for taken in times]


def ratio(times: list[float], base: list[float]) -> float:
    """The median over the rounds of how many times longer one took than the other."""
    return round(statistics.median(a / b for a, b in zip(times, base, strict=True)), 2)


def shares() -> dict[str, Any]:
    """The share of parameters that can shrink, of networks that come with fedtailor."""
    import torch

    from fedtailor.elasticity.explain import elastic_share
    from fedtailor.elasticity.front_door import elastic
    from fedtailor.models import build_model

    found = {}
    for name in SHARES:
        text = name in ("char-lstm", "transformer")
        shape = (80,) if text else (3, 32, 32)
        module = build_model(name, input_shape=shape, num_classes=86 if text else 10)
        inputs = torch.randint(0, 86, (2, *shape)) if text else torch.randn(2, *shape)
        found[name] = round(elastic_share(elastic(module, (inputs, torch.tensor([0, 1])))), 4)
    least = LIMITS["elastic_share"]
    return {"limit": least, "elastic_share": found, "within": all(share >= least for share in found.values())}


if __name__ == "__main__":
    sys.exit(main())
