"""How long one client's channel search takes: MobileNetV2-0.25x, 128 examples, R = 0.2, down to half the width.

    OMP_NUM_THREADS=1 python benchmarks/apfl_search.py [--record]

Time is processor time of one thread, so that other work on the machine does not count, in a process that keeps its
memory as workers do. Weights and images are random, and networks are not run on fewer examples than there are: 128 are
one batch. Where there are more, candidates that are clearly worse stop earlier.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import results
import torch

from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.engines.settings import FOR_TRAINING
from fedtailor.messages import Client, Lease, Task
from fedtailor.methods.apfl.fedcs import FedCS
from fedtailor.methods.apfl.judging import Judge
from fedtailor.models import build_model
from fedtailor.seeds import Seeds

EXAMPLES, SHRINK, WIDTH = 128, 0.2, 0.25


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_option(parser)
    options = parser.parse_args()
    if not os.environ.keys() >= FOR_TRAINING.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **FOR_TRAINING})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build_model("mobilenetv2", input_shape=(3, 32, 32), num_classes=10, width=WIDTH)
    data = Examples.of(torch.randn(EXAMPLES, 3, 32, 32), torch.arange(EXAMPLES) % 10)
    model = elastic(module, data.take(torch.arange(2)))
    method = FedCS(warmup=0, shrink=SHRINK, search_examples=EXAMPLES)
    patch = model.cut(method.init(model).weights, Cut.everything(), set(model.parameters))
    client = Client(0, "half", Budget(width=0.5), EXAMPLES)
    task = Task(client, 0, patch, Lease(frozenset(), patch.cut), Seeds(0), "search")
    wall, processor = time.monotonic(), time.process_time()
    update = method.perform(task, data, model)
    seconds = time.process_time() - processor
    result = {
        "model": f"mobilenetv2, width {WIDTH}, 32 x 32 pixels",
        "groups": len(model.groups.elastic),
        "examples": EXAMPLES,
        "shrink": SHRINK,
        "budget": "the MACs and parameters of half the width",
        "steps": int(update.metrics["steps"]),
        "full_passes": int(update.metrics["examples"]) // EXAMPLES,
        "share_of_budget": round(update.metrics["share of budget"], 4),
        "processor_seconds": round(seconds, 1),
        "wall_seconds": round(time.monotonic() - wall, 1),
        "seconds_of_one_full_pass": round(_one_pass(model, patch, data), 4),
    }
    results.report("search", result, options)


def _one_pass(model, patch, data) -> float:  # type: ignore[no-untyped-def]
    judge, started = Judge(model, patch, data), time.process_time()
    judge.metrics(model.costs.full)
    return time.process_time() - started


if __name__ == "__main__":
    main()
