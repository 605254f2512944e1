"""What saving a round of a ResNet-18 run costs, against writing and syncing the same bytes.

    python benchmarks/checkpoint.py --repeats 40 [--record "busy machine"]

One repetition saves a round the way a run does (metrics row, event, state, checksum, syncs, rename, the oldest
generation given up) and, right before or right after it, writes a new file of the same size with one write and two
syncs (file and folder). Which of the two goes first alternates, so that neither profits from what the disk is doing.
The checksum is computed beside the writing; where other programs use all processors, prefix ``chrt -f 5`` to measure
the machine instead of its load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import results
import torch

from fedtailor.elasticity.front_door import elastic
from fedtailor.methods.registry import get_method
from fedtailor.models import build_model
from fedtailor.record import Cohort, RoundRecord
from fedtailor.storage.checkpoint import Checkpoint, settle
from fedtailor.storage.generations import place_of
from fedtailor.storage.journal import CheckpointSettings, Journal


def plain_write(path: Path, data: bytes) -> None:
    """The baseline: a new file, durable in its folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def timed(function: Callable[[], None]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def resnet_run(width: str) -> Checkpoint:
    """The state of a ResNet-18 run before its first round."""
    torch.manual_seed(0)
    module = build_model(width, input_shape=(3, 32, 32), num_classes=10)
    model = elastic(module, (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)))
    return Checkpoint(settle(get_method("fedavg")().init(model)))


def measure(folder: Path, repeats: int, model: str) -> dict[str, object]:
    """Medians over the repetitions, and the quartiles of their ratios."""
    start = resnet_run(model)
    saves, writes, ratios = [], [], []
    with Journal.create(folder / "run", {}) as journal:
        journal.begin({}, CheckpointSettings(), start, torch.device("cpu"))
        size = place_of(folder / "run" / "checkpoints", 0).stat().st_size
        data = os.urandom(size)
        for number in range(1, repeats + 4):
            at = replace(start, state=replace(start.state, round=number))
            record = RoundRecord(number, Cohort(10), train_loss=1.0, seconds=0.1)
            steps = [lambda: journal.record(record, at), lambda: plain_write(folder / "plain", data)]  # noqa: B023
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: timed(steps[which]) for which in order}
            os.unlink(folder / "plain")
            if number > 3:  # the first ones fill the caches and the places of the generations that stay
                saves.append(seconds[0])
                writes.append(seconds[1])
                ratios.append(seconds[0] / seconds[1])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "model": model,
        "bytes": size,
        "repeats": repeats,
        "save_milliseconds_median": round(1000 * statistics.median(saves), 2),
        "write_milliseconds_median": round(1000 * statistics.median(writes), 2),
        "ratio_of_medians": round(statistics.median(saves) / statistics.median(writes), 3),
        "median_ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(value, 3) for value in quartiles],
        "limit": 1.5,
    }


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--model", default="preresnet18")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk that is measured")
    results.add_option(parser)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=arguments.folder))
    try:
        figures = measure(folder, arguments.repeats, arguments.model)
    finally:
        shutil.rmtree(folder)
    cores, first = len(os.sched_getaffinity(0)), os.sched_getscheduler(0) == os.SCHED_FIFO
    prefix = ("taskset -c 0 " if cores == 1 else "") + ("chrt -f 5 " if first else "")
    results.report("saving", figures, arguments, prefix)


if __name__ == "__main__":
    main()
