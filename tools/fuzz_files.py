"""Mutated files for everything that fedtailor reads: only ``FedtailorError`` may come of them.

    python tools/fuzz_files.py --count 10000 --seconds 600          # of each kind; what comes first ends it
    python tools/fuzz_files.py --kinds config,rows --seed 7

Every input is derived from the seed, its kind and its number; a failure is shown with these and ends the script with 1.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from fedtailor.config import load_config
from fedtailor.data.formats.idx import read_idx
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.own import read_own
from fedtailor.errors import FedtailorError
from fedtailor.record import Cohort, Covered, RoundRecord, Spent
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.storage import generations
from fedtailor.storage.checkpoint import decode_checkpoint
from fedtailor.storage.rows import as_line, coverage_line

CONFIG = """name = "x"
seed = 3
rounds = 20
[data]
dataset = "digits"
clients = 5
alpha = 0.5
[model]
name = "cnn"
channels = [4, 8]
[fleet]
tiers = [{ name = "a", width = 0.5, share = 1 }, { name = "b", width = 1, share = 2 }]
[method]
name = "fjord"
[engine]
deadline = 10.5
"""
PIECES = [
    b"", b"\0", b"\xff", b'"', b"[", b"]", b"{", b"}", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""',
    b"9" * 400, b"\n", b"=", b".", b",", b"\\u0000", b"[" * 2000, b"0", b"1.5",
]  # fmt: skip

Reader = Callable[[bytes, Path], object]


def mutated(data: bytes, numbers: np.random.Generator) -> bytes:
    """A few bits, bytes and pieces of a file are others, doubled, exchanged or gone."""
    found = bytearray(data)
    for _ in range(int(numbers.integers(1, 6))):
        place, length = int(numbers.integers(len(found) + 1)), int(numbers.integers(1, 20))
        kind = int(numbers.integers(6))
        if kind == 0 and place < len(found):
            found[place] ^= 1 << int(numbers.integers(8))
        elif kind == 1 and place < len(found):
            found[place] = int(numbers.integers(256))
        elif kind == 2:
            del found[place : place + length]
        elif kind == 3:
            found[place:place] = found[place : place + length]
        elif kind == 4:
            found[place : place + length] = PIECES[int(numbers.integers(len(PIECES)))]
        else:
            del found[place:]
        found = found or bytearray(b"\0")
    return bytes(found)


def records() -> list[RoundRecord]:
    """What a small run leaves."""
    tiers = {"a": {"loss": 1.5, "accuracy": 0.5}, "b": {"loss": 1.0, "accuracy": 0.75}}
    covered = (Covered(2, {"channels": {"conv1": 2}, "tag": "1/2"}),)
    return [
        RoundRecord(
            number, Cohort(3, 2, {"late": 1}, refused_by={"2": {"late": 1}}), Spent(10, 20, 30), train_loss=1.25,
            tiers=tiers, best_round=1, deployed={"a": {"params": 5, "macs": 7}}, reported={"1": {"x": 0.5}},
            method={"stage": "one"}, coverage=covered, failed={"KeyError: 1": ["2"]},
        )
        for number in (1, 2)
    ]  # fmt: skip


def run_files() -> dict[str, bytes]:
    """The files of a run that reports read."""
    setup = {
        "tiers": [{"name": "a", "clients": 2, "width": 0.5, "params": 5, "macs": 7, "allowed": {"macs": 9}},
                  {"name": "b", "clients": 2, "width": 1.0, "params": 9, "macs": 9, "allowed": {}}],
        "data": {"dataset": "x", "clients": 4, "train_examples": 9, "skew": 0.5, "label_counts": [5, 4],
                 "rows": [{"client": 0, "name": "a", "examples": 5, "label_counts": [3, 2]}]},
        "groups": {"conv1": 4},
        "layers": {"conv1.weight": [{"length": 4, "axes": [["conv1", 0, 1, 1, 1]]}, {"length": 1, "axes": []}]},
    }  # fmt: skip
    plan = {"folder": ".", "variant": "x", "cell": {"a": "b"}, "tier": ""}
    event = {"event": "round", "round": 1, "seconds": 0.5, "failed": {"KeyError: 1": ["2"]}}
    return {
        "metrics.jsonl": b"".join(as_line(each.as_row()) for each in records()),
        "coverage.jsonl": b"".join(as_line(coverage_line(each)) for each in records()),
        "events.jsonl": as_line(event),
        "setup.json": json.dumps(setup).encode(),
        "config.toml": CONFIG.encode(),
        "environment.json": b'{"packages": {"torch": "2.13.0"}, "threads": 1}',
        "comparison.json": json.dumps({"runs": [plan]}).encode(),
        "weights.safetensors": b"",
    }


def of_run(name: str) -> bytes:
    """One of these files."""
    return run_files()[name]


def in_run(name: str, *, shown: bool = False) -> Reader:
    """A run folder in which one file is mutated; ``shown``: its panels are made too."""

    def read(data: bytes, folder: Path) -> None:
        if not (folder / "weights.safetensors").exists():
            for other, content in run_files().items():
                (folder / other).write_bytes(content)
        (folder / name).write_bytes(data)
        runs = read_runs([folder])
        if shown and runs:
            all_panels(runs)

    return read


def in_file(name: str, read: Callable[[Path], object]) -> Reader:
    """A file that stands alone."""

    def read_file(data: bytes, folder: Path) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return read_file


def sealed(data: bytes, folder: Path) -> None:
    """A checkpoint that somebody has forged, with a checksum that fits."""
    generations.place_of(folder, 3).write_bytes(data + hashlib.sha256(data).digest())
    decode_checkpoint(generations.newest(folder).generation.payload)


def checkpoint() -> bytes:
    """A checkpoint without its checksum."""
    import torch

    from fedtailor.messages import ServerState
    from fedtailor.storage.checkpoint import Checkpoint, encode_checkpoint

    state = ServerState(3, {"w": torch.zeros(2, 3)}, {"x": [1, 2.5, "y"]})
    with tempfile.TemporaryDirectory() as folder:
        header: dict[str, Any] = {
            "round": 3,
            "parent_round": None,
            "parent": "",
            "metrics_size": 0,
            "metrics_sha256": "",
            "fingerprint": {},
        }
        generations.save(Path(folder), header, encode_checkpoint(Checkpoint(state, {1: {0: {"m": 1}}})))
        return generations.place_of(Path(folder), 3).read_bytes()[: -generations.DIGEST]


def npz() -> bytes:
    """A data set of four examples."""
    file = io.BytesIO()
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return file.getvalue()


IDX = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (2, 3, 3)) + bytes(18)
TABLE = b"colour,size,label\nred,1.5,yes\nblue,2.5,no\nred,3,yes\nblue,,no\n" * 3
LINES = b"".join(json.dumps({"text": f"word {n} of many", "label": n % 2}).encode() + b"\n" for n in range(8))

READ = [name for name in run_files() if name != "weights.safetensors"]
SHOWN = ("metrics.jsonl", "setup.json")  # whose mutations panels are made of

KINDS: dict[str, tuple[Callable[[], bytes], Reader]] = {
    "config": (CONFIG.encode, in_file("x.toml", load_config)),
    **{name.partition(".")[0]: (partial(of_run, name), in_run(name, shown=name in SHOWN)) for name in READ},
    "checkpoint": (checkpoint, sealed),
    "diagnostics": (lambda: save({"x": np.zeros(3, np.float32)}), in_run("diagnostics.safetensors")),
    "npz": (npz, in_file("x.npz", read_npz)),
    "idx": (lambda: IDX, in_file("x-idx3-ubyte", read_idx)),
    "idx-gz": (lambda: gzip.compress(IDX, mtime=0), in_file("x-idx3-ubyte.gz", read_idx)),
    "table": (lambda: TABLE, in_file("x.csv", lambda path: read_own(path))),
    "lines": (lambda: LINES, in_file("x.jsonl", lambda path: read_own(path))),
}  # fmt: skip


def fuzz(kind: str, count: int, seconds: float, seed: int) -> tuple[int, int, str]:
    """How many inputs were read, how many of them refused, and the traceback of the first that was neither."""
    make, read = KINDS[kind]
    start, end, refused = make(), time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            if time.monotonic() > end:
                return number, refused, ""
            data = mutated(start, np.random.default_rng([seed, number, *kind.encode()]))
            try:
                read(data, Path(name))
            except FedtailorError:
                refused += 1
            except Exception:  # noqa: BLE001  (whatever else comes is what is looked for)
                where = f"{kind}, seed {seed}, number {number}: {data[:300]!r}"
                return number, refused, f"{where}\n{traceback.format_exc()}"
    return count, refused, ""


def main() -> int:
    """Read mutated files of each kind, and say how many."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kinds", default=",".join(KINDS))
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    for kind in chosen.kinds.split(","):
        read, refused, problem = fuzz(kind, chosen.count, chosen.seconds, chosen.seed)
        print(f"{kind}: {read:,} inputs, {refused:,} refused{', and then:' if problem else ''}", flush=True)
        if problem:
            print(problem, flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
