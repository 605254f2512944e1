"""Mutated files for everything that fedtailor reads: only ``FedtailorError`` may come of them.

    python tools/fuzz_files.py --total 1000000                      # over all kinds; `make fuzz`
    python tools/fuzz_files.py --kinds config,table --total 20000 --seed 7

Readers that only parse get equal parts of the inputs; those that make a whole report of them cost fifty times as much
and get a fiftieth. Every input is derived from the seed, its kind and its number; failures are shown with these, each
kind of failure once, and end the script with 1.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_run import CONFIG, run_files
from PIL import Image
from safetensors.numpy import save

from fedtailor.config import load_config
from fedtailor.data.formats.idx import read_idx
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.formats.pickled import NotPlainError, read_plain
from fedtailor.data.own import read_own
from fedtailor.deploying.bundle import FORMAT, MANIFEST, read_manifest
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.errors import FedtailorError
from fedtailor.flower.device_file import read_device
from fedtailor.messages import ServerState
from fedtailor.models.pretrained import read_weights
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.storage import generations, sheets
from fedtailor.storage.checkpoint import Checkpoint, Memories, decode_checkpoint, encode_checkpoint
from fedtailor.storage.run_folder import RunFolder
from fedtailor.storage.sheets import Sheets, Span
from fedtailor.storage.sparse_file import load_sparse, sparse_bytes

PIECES = [
    b"", b"\0", b"\xff", b'"', b"[", b"]", b"{", b"}", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""',
    b"9" * 400, b"\n", b"=", b".", b",", b"\\u0000", b"[" * 2000, b"0", b"1.5",
]  # fmt: skip

Reader = Callable[[bytes, Path], object]

MEMORY = Path("/dev/shm")  # where it is there, files cost a tenth
HEAVY = 50  # times what a parser costs
MOST_PROBLEMS = 5  # of a kind, before it is left alone


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A few bits, bytes and pieces of a file are others, doubled, exchanged or gone."""
    found = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        place, length = draw.randrange(len(found) + 1), draw.randrange(1, 20)
        kind = draw.randrange(6)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << draw.randrange(8)
        elif kind == 1 and place < len(found):
            found[place] = draw.randrange(256)
        elif kind == 2:
            del found[place : place + length]
        elif kind == 3:
            found[place:place] = found[place : place + length]
        elif kind == 4:
            found[place : place + length] = draw.choice(PIECES)
        else:
            del found[place:]
        found = found or bytearray(b"\0")
    return bytes(found)


def in_run(name: str, look: Callable[[Path], object]) -> Reader:
    """A run folder in which one file is mutated."""

    def read(data: bytes, folder: Path) -> None:
        if not (folder / "weights.safetensors").exists():
            for other, content in run_files().items():
                (folder / other).write_bytes(content)
        (folder / name).write_bytes(data)
        look(folder)

    return read


def reported(folder: Path) -> None:
    """All that a report makes of a folder."""
    runs = read_runs([folder])
    if runs:
        all_panels(runs)


def in_file(name: str, read: Callable[[Path], object]) -> Reader:
    """A file that stands alone."""

    def read_file(data: bytes, folder: Path) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return read_file


def sealed(data: bytes, folder: Path) -> None:
    """A checkpoint that somebody has forged, with a checksum that fits."""
    generations.place_of(folder, 3).write_bytes(data + hashlib.sha256(data).digest())
    generation = generations.newest(folder).generation
    Span.named_in(generation.header)
    decode_checkpoint(generation.payload)


def checkpoint() -> bytes:
    """A checkpoint without its checksum."""
    state = ServerState(3, {"w": torch.zeros(2, 3)}, {"x": [1, 2.5, "y"]})
    header: dict[str, Any] = {
        "round": 3, "parent_round": None, "parent": "", "metrics_size": 0, "metrics_sha256": "", "fingerprint": {},
        "memories": {"first": 1, "skipped": 0, "last": 2, "digest": "0" * 64},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        generations.save(Path(folder), header, encode_checkpoint(Checkpoint(state, {1: {0: {"m": 1}}})))
        return generations.place_of(Path(folder), 3).read_bytes()[: -generations.DIGEST]


def sheet() -> bytes:
    """A sheet of clients' memories without its checksum."""
    with tempfile.TemporaryDirectory() as folder:
        kept: Memories = {1: {1: {"m": 1, "p": torch.ones(3)}}, 4: {2: {"m": [2.5, None]}}}
        Sheets().with_memories(Path(folder), 3, kept)
        return generations.place_of(Path(folder), 3, sheets.SUFFIX).read_bytes()[: -generations.DIGEST]


def sealed_sheet(data: bytes, folder: Path) -> None:
    """A sheet that somebody has forged, with a checksum that fits."""
    digest = hashlib.sha256(data).digest()
    generations.place_of(folder, 3, sheets.SUFFIX).write_bytes(data + digest)
    sheets.read(folder, Span(3, 0, 3, digest.hex()), torch.device("cpu"))


def npz() -> bytes:
    """A data set of four examples."""
    file = io.BytesIO()
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return file.getvalue()


def picture() -> bytes:
    """A small image."""
    file = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(file, "PNG")
    return file.getvalue()


def in_pictures(data: bytes, folder: Path) -> None:
    """A folder of images, one of which is mutated."""
    for name in ("train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/dog/1.png"):
        file = folder / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture())
    (folder / "train/cat/1.png").write_bytes(data)
    read_own(folder)


IDX = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (2, 3, 3)) + bytes(18)
TABLE = b"weight,size,label\n" + b"1,1.5,yes\n-2,2.5,no\n3e2,3,yes\n4,0,no\n" * 3
LINES = b"".join(json.dumps({"text": f"word {n} of many", "label": n % 2}).encode() + b"\n" for n in range(8))
ROWS = b"".join(json.dumps({"x": [n, 0.5], "y": n % 2}).encode() + b"\n" for n in range(8))
USERS = b"".join(
    json.dumps({"user": f"u{n % 2}", "text": "to be or not to be " * 6}).encode() + b"\n" for n in range(4)
)
DEVICE = b'tier = "phone"\nmemory = "256 MB"\nmacs = 1000000\npartition-id = 1\nnum-partitions = 3\n'
PLAIN = b"\x80\x02}q\x00(U\x04dataq\x01]q\x02(K\x01K\x02eU\x06labelsq\x03]q\x04(K\x00K\x01eu."
INPUTS = [{"name": "x", "type": "float32", "shape": ["batch", 3]}]
FILE = {"file": "a.onnx", "format": "onnx", "sha256": "0", "size": 9, "inputs": INPUTS}
NETWORK = {
    "name": "a",
    "client": None,
    "params": 5,
    "macs": 7,
    "peak_memory": 8,
    "score": None,
    "files": [FILE],
}
BUNDLE = {
    "format": FORMAT, "run": {"name": "r"}, "model": None, "task": "regression", "metrics": [], "inputs": INPUTS,
    "outputs": INPUTS, "preparation": {}, "labels": [], "networks": [NETWORK],
}  # fmt: skip


def plain(data: bytes, _folder: Path) -> None:
    """Pickles of plain values, whose reader has an error of its own: who calls it says which file that was."""
    try:
        read_plain(data)
    except NotPlainError as error:
        raise FedtailorError(str(error)) from error


def weights() -> bytes:
    """Tensors as a finished run writes them."""
    return save({"x": np.zeros(3, np.float32), "y": np.ones((2, 2), np.int64)}, metadata={"about": "{}"})


def sparse() -> bytes:
    """Weights as a deployed network has them."""
    return sparse_bytes(Patch({"w": torch.ones(2, 3), "b": torch.zeros(2)}, Cut.everything()), {"c": "b"})


FILES = run_files()
KINDS: dict[str, tuple[Callable[[], bytes], Reader]] = {
    "config": (CONFIG.encode, in_file("x.toml", load_config)),
    **{
        name.partition(".")[0]: (partial(FILES.__getitem__, name), in_run(name, lambda run: RunFolder(run).records()))
        for name in ("metrics.jsonl", "coverage.jsonl", "events.jsonl")
    },
    "setup": (partial(FILES.__getitem__, "setup.json"), in_run("setup.json", lambda run: RunFolder(run).setup())),
    "checkpoint": (checkpoint, sealed),
    "sheet": (sheet, sealed_sheet),
    "weights": (weights, in_file("x.safetensors", read_weights)),
    "sparse": (sparse, in_file("x.safetensors", load_sparse)),
    "manifest": (json.dumps(BUNDLE).encode, in_file(MANIFEST, lambda path: read_manifest(path.parent))),
    "device": (lambda: DEVICE, in_file("x.toml", read_device)),
    "npz": (npz, in_file("x.npz", read_npz)),
    "arrays": (npz, in_file("x.npz", read_own)),
    "idx": (lambda: IDX, in_file("x-idx3-ubyte", read_idx)),
    "idx-gz": (lambda: gzip.compress(IDX, mtime=0), in_file("x-idx3-ubyte.gz", read_idx)),
    "pickled": (lambda: PLAIN, plain),
    "table": (lambda: TABLE, in_file("x.csv", read_own)),
    "lines": (lambda: LINES, in_file("x.jsonl", read_own)),
    "rows": (lambda: ROWS, in_file("x.jsonl", read_own)),
    "users": (lambda: USERS, in_file("x.jsonl", read_own)),
    "pictures": (picture, in_pictures),
}  # fmt: skip
REPORTS: dict[str, tuple[Callable[[], bytes], Reader]] = {
    f"report of {name}": (partial(FILES.__getitem__, name), in_run(name, reported))
    for name in FILES
    if name != "weights.safetensors"
}
REPORTS["report of diagnostics"] = (weights, in_run("diagnostics.safetensors", reported))


def fuzz(kind: str, count: int, seconds: float, seed: int) -> tuple[int, int, dict[str, str]]:
    """How many inputs were read, how many of them refused, and a traceback of each kind that was neither."""
    make, read = {**KINDS, **REPORTS}[kind]
    start, end, refused = make(), time.monotonic() + seconds, 0
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        read(start, Path(name))  # what is not mutated is fine: else mutations would show nothing
        for number in range(count):
            if time.monotonic() > end or len(problems) >= MOST_PROBLEMS:
                return number, refused, problems
            data = mutated(start, random.Random(f"{seed} {kind} {number}"))
            try:
                read(data, Path(name))
            except FedtailorError:
                refused += 1
            except Exception as error:  # noqa: BLE001  (whatever else comes is what is looked for)
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{kind}, seed {seed}, number {number}: {data[:300]!r}\n{traceback.format_exc(-6)}"
                problems.setdefault(f"{type(error).__name__} in {last.name}, line {last.lineno}", where)
    return count, refused, problems


def main() -> int:
    """Read mutated files of each kind, and say how many."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--total", type=int, default=20_000, help="inputs, over all kinds")
    options.add_argument("--seconds", type=float, default=3600.0, help="for each kind")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kinds", default=",".join([*KINDS, *REPORTS]))
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    kinds = chosen.kinds.split(",")
    shares = [1 / HEAVY if kind in REPORTS else 1.0 for kind in kinds]
    failed = inputs = 0
    for kind, share in zip(kinds, shares, strict=True):
        begin = time.monotonic()
        count = -int(-chosen.total * share // sum(shares))
        read, refused, problems = fuzz(kind, count, chosen.seconds, chosen.seed)
        pace = read / (time.monotonic() - begin)
        print(f"{kind:24} {read:9,} inputs, {refused:9,} refused, {pace:6,.0f} per second", flush=True)
        for what, shown in problems.items():
            print(f"{what}: {shown}", flush=True)
        failed |= bool(problems)
        inputs += read
    print(f"{inputs:,} inputs{', of which some raised what they should not' if failed else ''}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
