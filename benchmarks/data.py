"""Measure what the data layer promises.

    python benchmarks/data.py statistics            # means and deviations of the sets that are here
    python benchmarks/data.py dirichlet             # 1,000 clients, alpha 0.01, 60,000 examples
    python benchmarks/data.py augmentation          # a batch of 32 against a training step, interleaved
    python benchmarks/data.py million               # a million clients over CIFAR-sized data

Run with OMP_NUM_THREADS=1, as clients train. Files are looked for in FEDTAILOR_DATA. --record writes the figures down.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
from torch import nn

from fedtailor.data import (
    Dataset,
    DataSettings,
    Examples,
    ImagePreparation,
    dataset_names,
    federate,
    inputs_of,
    load_dataset,
    partitions,
    target_of,
)
from fedtailor.data.catalogue.cifar import CIFAR10
from fedtailor.errors import FedtailorError
from fedtailor.models import build_model
from fedtailor.seeds import Seeds

MEBIBYTE = 2**20


def pixel_statistics(examples: Examples, batch: int = 5000) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, as the stored pixels divided by the preparation's white."""
    preparation = examples.preparation
    assert isinstance(preparation, ImagePreparation)
    images = inputs_of(examples.columns)[0][0]
    total, squares, count = torch.zeros(images.shape[1]).double(), torch.zeros(images.shape[1]).double(), 0
    for first in range(0, len(images), batch):
        values = images[first : first + batch].double() / preparation.white
        total += values.sum((0, 2, 3))
        squares += (values**2).sum((0, 2, 3))
        count += values.numel() // values.shape[1]
    mean = total / count
    return mean.tolist(), (squares / count - mean**2).sqrt().tolist()


def measure_statistics(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every set whose files are here: sizes, seconds to load, mean and deviation of the training part."""
    figures: dict[str, Any] = {}
    for name in arguments.datasets or dataset_names():
        begin = time.perf_counter()
        try:
            dataset = load_dataset(name)
        except FedtailorError as error:
            figures[name] = f"not measured: {str(error).split('.')[0]}"
            continue
        seconds = time.perf_counter() - begin
        row: dict[str, Any] = {
            "train": len(dataset.train),
            "test": len(dataset.test),
            "classes": dataset.num_classes,
            "seconds_to_load": round(seconds, 2),
        }
        if dataset.client_train is not None:
            row["natural_clients"] = len(np.unique(dataset.client_train))
        if isinstance(dataset.train.preparation, ImagePreparation):
            mean, std = pixel_statistics(dataset.train)
            row |= {"mean": [round(value, 4) for value in mean], "std": [round(value, 4) for value in std]}
            row["preparation_mean"] = dataset.train.preparation.mean
            row["preparation_std"] = dataset.train.preparation.std
        figures[name] = row
    return figures


def repeated(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of several calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure_dirichlet(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the hardest split that is promised, with several minimum sizes."""
    labels = np.repeat(np.arange(10), 6000)
    figures: dict[str, Any] = {"clients": 1000, "alpha": 0.01, "examples": 60_000, "limit_seconds": 2}
    for minimum in (1, 10, 60):
        generator = np.random.default_rng(0)
        split = partial(partitions.dirichlet, labels, 1000, 0.01, generator, min_examples=minimum)
        seconds = repeated(split, arguments.repeats)
        figures[f"median_seconds_min_examples_{minimum}"] = round(statistics.median(seconds), 4)
        figures[f"largest_seconds_min_examples_{minimum}"] = round(max(seconds), 4)
    return figures


def cifar_sized() -> Dataset:
    """Random bytes of the size of CIFAR-10, prepared as CIFAR-10 is."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> Examples:
        images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Examples.of(images, torch.arange(count) % 10, preparation=CIFAR10.preparation)

    return Dataset("cifar-sized", part(50_000), part(10_000), 10)


def measure_augmentation(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time to prepare 32 augmented images and of one training step, in turn: both see the same load."""
    train = cifar_sized().train
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = build_model(
        "resnet18", input_shape=(3, 32, 32), num_classes=10, widths=(16, 32, 64, 128), stem=16
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    loss = nn.CrossEntropyLoss()
    prepare_seconds, step_seconds = [], []
    for _ in range(arguments.repeats + 3):
        rows = torch.randint(0, len(train), (32,), generator=generator)
        begin = time.perf_counter()
        batch = train.take(rows, generator=generator)
        middle = time.perf_counter()
        (images,), _ = inputs_of(batch)
        optimizer.zero_grad()
        loss(model(images), target_of(batch)).backward()
        optimizer.step()
        step_seconds.append(time.perf_counter() - middle)
        prepare_seconds.append(middle - begin)
    prepare, step = (
        statistics.median(values[3:]) for values in (prepare_seconds, step_seconds)
    )  # 3 to warm up
    return {
        "batch": 32,
        "model": "resnet18, widths 16 32 64 128",
        "repeats": arguments.repeats,
        "median_prepare_milliseconds": round(1000 * prepare, 3),
        "median_step_milliseconds": round(1000 * step, 3),
        "share_percent": round(100 * prepare / step, 2),
        "limit_percent": 10,
    }


def memory(field: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM, the most since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def measure_million(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory beyond the data to spread CIFAR-sized data over a million clients (Linux)."""
    dataset = cifar_sized()
    clients = 1_000_000
    figures: dict[str, Any] = {"limit_seconds": 5, "limit_mebibytes": 200}
    settings = DataSettings(clients=clients, partition="overlapping", examples_per_client=arguments.examples)
    figures["overlapping"] = {
        "clients": clients,
        "examples_per_client": arguments.examples,
        **set_up(partial(federate, dataset, settings, Seeds(0))),
    }
    tiny = torch.zeros(4 * clients, 1, dtype=torch.uint8)
    many = Dataset("tiny", Examples.of(tiny, torch.arange(len(tiny)) % 10), dataset.test, 10)
    for kind in ("iid", "dirichlet", "quantity", "classes", "shards"):
        chosen = DataSettings(clients=clients, partition=kind, alpha=0.1)
        figures[f"{kind}, 4,000,000 tiny examples"] = set_up(partial(federate, many, chosen, Seeds(0)))
    return figures


def set_up(action: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one call, the most memory it needed, and what it keeps."""
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = memory("VmRSS")
    begin = time.perf_counter()
    data = action()
    seconds = time.perf_counter() - begin
    figures = {
        "seconds": round(seconds, 2),
        "peak_mebibytes_beyond_data": round(memory("VmHWM") - before, 1),
        "kept_mebibytes": round((data.partition.order.nbytes + data.partition.offsets.nbytes) / MEBIBYTE, 1),
    }
    begin = time.perf_counter()
    for client in range(0, data.num_clients, data.num_clients // 100):
        data.client(client).take(torch.arange(2))
    figures["milliseconds_to_fetch_a_client"] = round((time.perf_counter() - begin) * 10, 3)
    return figures


MEASURES = {
    "statistics": measure_statistics,
    "dirichlet": measure_dirichlet,
    "augmentation": measure_augmentation,
    "million": measure_million,
}


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--datasets", nargs="*", help="statistics: which sets (default: all)")
    parser.add_argument("--repeats", type=int, default=30, help="how often a time is taken")
    parser.add_argument("--examples", type=int, default=20, help="million: examples per client")
    results.add_option(parser)
    arguments = parser.parse_args()
    results.report(arguments.measure, MEASURES[arguments.measure](arguments), arguments)


if __name__ == "__main__":
    main()
