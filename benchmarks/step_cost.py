"""What a local step at width p costs, against a plain PyTorch step of a network of that width; and a client's memory.

    python benchmarks/step_cost.py [--record]

The client holds the whole ResNet-18 (CIFAR form) and takes FjORD's steps at one width: copying the weights together,
forward, backward, SGD, writing back, statistics of the width included. The plain step runs the extracted small module
with torch.optim.SGD. Both alternate, so that a busy machine slows both, and the lower quartile of each is compared.
Processor time of one thread, no momentum, no weight decay. Memory is the growth of the process's resident set while a
client of that width trains, each in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.strided import leave_out_pixels_first
from fedtailor.messages import Client
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.models import build_model
from fedtailor.seeds import Seeds

LOCAL = LocalTraining(lr=0.01)


def resnet(stem: int = 64) -> ElasticModel:
    """ResNet-18 for 32-pixel images; with a stem of 16 a quarter of its channels."""
    torch.manual_seed(0)
    example = (torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))
    sizes: dict[str, Any] = {"stem": stem, "widths": [stem, 2 * stem, 4 * stem, 8 * stem]}
    return elastic(build_model("resnet18", input_shape=(3, 32, 32), num_classes=10, **sizes), example)


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise in the shape of CIFAR-10."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 32, 32, generator=generator), torch.randint(
        0, 10, (size,), generator=generator
    )


def client_steps(model: ElasticModel, held: str, width: str) -> LocalSteps:
    """A client that holds one width and whose steps all draw another."""
    widths = (width,) if held == width else (width, held)
    method = FjORD(LOCAL, widths=widths, probabilities=(1.0, 1e-12)[: len(widths)], distillation=False)
    client = Client(0, "tier", Budget(width=held), 100)
    return LocalSteps(method, method.assign(method.init(model), client, model, Seeds(0)), model)


def plain_step(
    model: ElasticModel, width: str, batch: Any, layout: torch.memory_format
) -> Callable[[], None]:
    """A training step as anyone would write it, on a network of that width."""
    small = model.extract(model.weights(), prefix(model.groups, Fraction(width))).train()
    for parameter in small.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.clone(memory_format=layout)  # strides, also of one channel
    if layout == torch.channels_last:
        leave_out_pixels_first(small)  # without it narrow shortcuts may corrupt memory in this layout
    optimiser = torch.optim.SGD(small.parameters(), lr=LOCAL.lr)
    x, y = batch

    def step() -> None:
        optimiser.zero_grad()
        loss = F.cross_entropy(small(x), y)
        loss.item()
        loss.backward()
        optimiser.step()

    return step


def measure_time(
    model: ElasticModel, widths: list[str], batch_size: int, repeats: int
) -> list[dict[str, Any]]:
    """Processor seconds per step, ours and plain, alternating."""
    batch = batch_of(batch_size)
    rows = []
    for width in widths:
        ours = client_steps(model, "1", width)
        steps: dict[str, Callable[[], object]] = {
            "plain": plain_step(model, width, batch, torch.contiguous_format),
            "plain_channels_last": plain_step(model, width, batch, torch.channels_last),
            "ours": partial(ours.take, 0, batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 3):
            for name, step in steps.items():
                started = time.process_time()
                step()
                if repeat >= 3:  # the first steps choose algorithms and fill caches
                    seconds[name].append(time.process_time() - started)
        quartiles = {name: sorted(values)[len(values) // 4] for name, values in seconds.items()}
        rows.append(
            {
                "width": width,
                **{f"{name}_seconds": round(value, 5) for name, value in quartiles.items()},
                "ratio": round(quartiles["ours"] / quartiles["plain"], 3),
                "ratio_channels_last": round(quartiles["ours"] / quartiles["plain_channels_last"], 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def measure_memory(widths: list[str], batch_size: int) -> list[dict[str, Any]]:
    """Peak growth of the resident set while a client trains its largest width."""
    rows = []
    for width in widths:
        command = [sys.executable, __file__, "--memory-of", width, "--batch-size", str(batch_size)]
        grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append({"width": width, "peak_bytes": grown})
        print(rows[-1], flush=True)
    return rows


def memory_of(width: str, batch_size: int) -> int:
    """In a fresh process: bytes above what was resident before the client began."""
    model, batch = resnet(), batch_of(batch_size)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that tracing has freed must not be used again unseen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = _status("VmRSS")
    steps = client_steps(model, width, width)
    for _ in range(2):
        steps.take(0, batch)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Measure, print, and write if asked to."""
    import results  # here, because a test loads this file by its path, and the folder is not on that of Python

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=24)
    results.add_option(parser)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(memory_of(options.memory_of, options.batch_size))
        return
    result = {
        "network": "resnet18",
        "batch_size": options.batch_size,
        "time": measure_time(resnet(), ["1/5", "2/5", "3/5"], options.batch_size, options.repeats),
        "quarter_time": measure_time(
            resnet(16), ["1/5", "2/5", "3/5", "4/5"], options.batch_size, options.repeats
        ),
        "memory": measure_memory(["1/5", "2/5", "3/5", "4/5", "1"], options.batch_size),
    }
    results.report("resnet18", result, options)


if __name__ == "__main__":
    main()
