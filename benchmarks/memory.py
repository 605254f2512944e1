"""Is the estimate of training memory right? Compare it with the growth of resident memory in fresh processes.

    python benchmarks/memory.py [--record]

Every case runs in a process of its own, as a client would: it holds the module and its data, receives a piece of the
model, and trains it with the library's own local loop. Growth is the peak of resident memory minus what was resident
before the piece arrived. It is measured twice. glibc by default keeps freed blocks of up to 32 MB for later, and how
much of that is in use at the peak is a matter of luck; with MALLOC_MMAP_THRESHOLD_ fixed, large blocks go back to the
system at once and the growth is what training really holds. The estimate is compared with the latter.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import results

MODELS: dict[str, tuple[tuple[int, ...], int]] = {  # name -> shape of an input, classes
    "cnn": ((3, 32, 32), 10),
    "resnet18": ((3, 32, 32), 10),
    "mobilenetv2": ((3, 32, 32), 10),
    "char-lstm": ((80,), 86),
}
WIDTHS = ("1/4", "1/2", "1")
BATCH_SIZE, MOMENTUM, STEPS = 32, 0.9, 4
TOLERANCE = 0.25
ALLOCATORS = {"blocks returned": {"MALLOC_MMAP_THRESHOLD_": "65536"}, "glibc default": {}}


def main() -> int:
    """Run all cases, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    results.add_option(parser)
    parser.add_argument(
        "--case", nargs=2, metavar=("MODEL", "WIDTH"), help="measure one case in this process"
    )
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(*options.case)))
        return 0
    cases = [compared(model, width) for model in MODELS for width in WIDTHS]
    result = {
        "batch_size": BATCH_SIZE,
        "momentum": MOMENTUM,
        "tolerance": TOLERANCE,
        "within": all(case["within"] for case in cases),
        "cases": cases,
    }
    results.report("training", result, options)
    return 0 if result["within"] else 1


def compared(model: str, width: str) -> dict[str, Any]:
    """One case under each allocator setting, in processes of their own."""
    growth, estimate = {}, 0
    for name, variables in ALLOCATORS.items():
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, __file__, "--case", model, width]
        answer = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
        growth[name], estimate = answer["growth"], answer["estimate"]
    ratio = estimate / growth["blocks returned"]
    case = {
        "model": model,
        "width": width,
        "estimate": estimate,
        "growth": growth,
        "ratio": round(ratio, 3),
        "within": abs(ratio - 1) <= TOLERANCE,
        "ratio_glibc_default": round(estimate / growth["glibc default"], 3),
    }
    print(
        f"{model:12} {width:4} estimate {estimate / 1e6:7.1f} MB, growth {growth['blocks returned'] / 1e6:7.1f} MB, "
        f"ratio {ratio:.2f}; glibc default {growth['glibc default'] / 1e6:7.1f} MB"
    )
    return case


def measured(name: str, width: str) -> dict[str, int]:
    """The estimate and the growth of resident memory of one case, in this process."""
    import torch

    from fedtailor.client.local_training import LocalTraining
    from fedtailor.data.batches import Examples
    from fedtailor.elasticity.costing.memory import Workload
    from fedtailor.elasticity.cutting.selections import prefix
    from fedtailor.elasticity.front_door import elastic
    from fedtailor.methods.fedavg import FedAvg
    from fedtailor.models import build_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape, classes = MODELS[name]
    module = build_model(name, input_shape=shape, num_classes=classes)
    count = STEPS * BATCH_SIZE
    inputs = torch.randint(classes, (count, *shape)) if len(shape) == 1 else torch.randn(count, *shape)
    data = Examples.of(inputs, torch.randint(classes, (count,)))
    model = elastic(module, data.take(torch.arange(2)))
    cut = prefix(model.groups, Fraction(width))
    estimate = model.cost(cut, Workload(BATCH_SIZE, optimiser_slots=1)).training_memory
    assert estimate is not None

    def train(examples: Examples, batch_size: int) -> None:
        local = LocalTraining(lr=0.01, momentum=MOMENTUM, batch_size=batch_size)
        task = task_for(model, cut)
        FedAvg(local=local).perform(task, examples, model)

    train(data.subset(torch.arange(4)), 2)  # loads kernels and fills caches, which do not belong to the piece
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    train(data, BATCH_SIZE)
    return {"estimate": estimate, "growth": resident("VmHWM") - before}


def task_for(model: Any, cut: Any) -> Any:
    """What a client is sent: the piece, copied out of the module's weights."""
    from fedtailor.elasticity.costing.budget import Budget
    from fedtailor.elasticity.tracing.copies import named_tensors
    from fedtailor.messages import Client, Lease, Task
    from fedtailor.seeds import Seeds

    weights = {name: value.detach() for name, value in named_tensors(model.module).items()}
    patch = model.cut(weights, cut)
    lease = Lease(frozenset(patch.values), cut)
    return Task(Client(0, "device", Budget(width=1), STEPS * BATCH_SIZE), 0, patch, lease, Seeds(0))


def resident(field: str) -> int:
    """A field of the process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    sys.exit(main())
