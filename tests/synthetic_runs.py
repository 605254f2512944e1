"""Run folders as a run would leave them, made without training anything: five methods, many rounds, several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtailor.elasticity.cutting.cut import Cut, as_units
from fedtailor.elasticity.cutting.encoding import cut_value
from fedtailor.record import Cohort, Covered, RoundRecord, Spent

TIERS = {"0.2": 0.2, "0.4": 0.4, "0.6": 0.6, "0.8": 0.8, "1": 1.0}
METHODS = {"fedavg": 0.86, "heterofl": 0.93, "fjord": 0.94, "fedrolex": 0.90, "splitmix": 0.91}
WIDTH = 40  # units of each hidden layer
SHAPES = {"conv1": (WIDTH, 1), "conv2": (WIDTH, WIDTH), "linear": (10, WIDTH)}


def write_runs(
    folder: Path,
    rounds: int = 200,
    seeds: int = 3,
    methods: dict[str, float] | None = None,
    *,
    finished: bool = True,
) -> list[Path]:
    """One folder for each method and seed; accuracies climb towards the method's own level, noise differs by seed."""
    chosen = METHODS if methods is None else methods
    return [
        write_run(folder / f"{method}-seed{seed}", method, level, seed, rounds, finished=finished)
        for method, level in chosen.items()
        for seed in range(1, seeds + 1)
    ]


def write_run(
    folder: Path, method: str, level: float, seed: int, rounds: int, *, finished: bool = True
) -> Path:
    folder.mkdir(parents=True)
    numbers = np.random.default_rng([seed, len(method)])
    shared = np.random.default_rng(seed).normal(0, 0.01)  # what a seed does to every method
    records = []
    for round in range(1, rounds + 1):
        records.append(record_of(round, level + shared, method, numbers))
    write_records(folder, records)
    (folder / "setup.json").write_text(json.dumps(setup_of(seed)))
    (folder / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13.0"}, "threads": 1}))
    (folder / "config.toml").write_text(
        f'name = "{folder.name}"\nseed = {seed}\nrounds = {rounds}\n[method]\nname = "{method}"\n[data]\nalpha = 0.5\n'
    )
    if finished:
        (folder / "weights.safetensors").write_bytes(b"")
    return folder


def write_records(folder: Path, records: Sequence[RoundRecord]) -> None:
    """The files of a run that hold its rounds."""
    rows = [record.as_row() for record in records]
    lines = [
        {"round": record.round, "coverage": [vars(each) for each in record.coverage]} for record in records
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "coverage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def record_of(round: int, level: float, method: str, numbers: np.random.Generator) -> RoundRecord:
    climbed = level * (1 - np.exp(-round / 25))
    tiers = {
        tier: {"loss": float(1 - climbed), "accuracy": float(np.clip(score + numbers.normal(0, 0.004), 0, 1))}
        for tier, score in ((tier, climbed - 0.1 * (1 - width)) for tier, width in TIERS.items())
    }
    size = 400_000 if method != "fedavg" else 90_000
    return RoundRecord(
        round,
        Cohort(asked=10, merged=10),
        training=Spent(size, size, 70 * size),
        train_loss=float(1 - climbed),
        tiers=tiers,
        best_round=round,
        coverage=coverage_of(round, method),
    )


def coverage_of(round: int, method: str) -> list[Covered]:
    """HeteroFL's prefixes, or FedRolex' windows in lockstep."""
    found = []
    for width in TIERS.values():
        count, start = round_up(width * WIDTH), round % WIDTH if method == "fedrolex" else 0
        units = as_units(sorted((start + unit) % WIDTH for unit in range(count)), WIDTH, "conv1")
        channels = {} if count == WIDTH else {"conv1": units, "conv2": units}
        found.append(Covered(2, cut_value(Cut(channels))))
    return found


def round_up(value: float) -> int:
    return int(-(-value // 1))


def setup_of(seed: int) -> dict:
    numbers = np.random.default_rng(seed)
    counts = numbers.integers(0, 30, (20, 10)).tolist()
    rows = [
        {
            "client": client,
            "name": str(client),
            "examples": sum(each),
            "own_test_examples": 0,
            "label_counts": each,
        }
        for client, each in enumerate(counts)
    ]
    tiers = [
        {"name": tier, "clients": 4, "width": width, "budget": f"width {tier}", "params": int(1e5 * width**2),
         "macs": int(1e6 * width**2)}
        for tier, width in TIERS.items()
    ]  # fmt: skip

    def axis(length: int, group: str | None) -> dict:
        return {"length": length, "axes": [[group, 0, 1, 1, 0]] if group else []}

    layers = {
        "conv1.weight": [axis(WIDTH, "conv1"), axis(1, None)],
        "conv2.weight": [axis(WIDTH, "conv2"), axis(WIDTH, "conv1")],
        "linear.weight": [axis(10, None), axis(WIDTH, "conv2")],
    }
    data = {
        "dataset": "synthetic",
        "clients": 20,
        "train_examples": sum(map(sum, counts)),
        "skew": 0.31,
        "rows": rows,
    }
    return {"tiers": tiers, "data": data, "groups": {"conv1": WIDTH, "conv2": WIDTH}, "layers": layers}
