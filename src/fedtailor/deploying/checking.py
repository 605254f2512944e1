"""What a deployed file does on this machine: latency, memory, accuracy, and whether its manifest is right."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from fedtailor.data.datasets import load_dataset
from fedtailor.data.transforms import deployable
from fedtailor.deploying.bundle import MANIFEST, read_manifest
from fedtailor.deploying.formats import Program, format_of
from fedtailor.deploying.inputs import Inputs, as_given, made_up
from fedtailor.deploying.scoring import MOST_EXAMPLES, Meaning, Score, score
from fedtailor.errors import CorruptError, FedtailorError, require
from fedtailor.models import build_model
from fedtailor.objective import TASKS

WARM_UP = 5  # calls before the first that counts
SAME_SCORE = 0.005  # a difference of a metric that is called out


@dataclass(frozen=True)
class Checked:
    """What was found out about a file; ``differences`` is what the manifest says otherwise."""

    file: Path
    form: str
    size: int
    repeats: int
    median_ms: float
    p95_ms: float
    memory: (
        int | None
    )  # bytes above the process before the file was loaded; None where the system does not tell
    score: Score | None = None
    expected: Mapping[str, Any] | None = None  # the entry of the manifest, if there is one
    differences: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "file": str(self.file), "format": self.form, "size": self.size, "repeats": self.repeats,
            "median_ms": self.median_ms, "p95_ms": self.p95_ms, "memory": self.memory,
            "score": None if self.score is None else self.score.as_data(),
            "manifest": self.expected is not None, "differences": self.differences,
        }  # fmt: skip


def check(
    file: Path | str, data: str | None = None, model: str | None = None, *, repeats: int = 100
) -> Checked:
    """Run a file on this machine, one example at a time; ``data`` names test examples, as a config does.

    A manifest beside the file says what to expect; without one the file says itself what its inputs are, where it can.
    """
    path = Path(file)
    require(repeats >= 1, "repeats", repeats, "at least 1")
    form = format_of(path)
    manifest = read_manifest(path.parent) if (path.parent / MANIFEST).is_file() else {}
    network, entry = _entry(manifest, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if entry is not None and digest != entry["sha256"]:
        raise CorruptError(f"{path} is damaged or another file: its sha256 is not the one in {MANIFEST}")
    if entry is None and data is not None:
        raise FedtailorError(
            f"--data {data}: no {MANIFEST} beside {path} says what its outputs mean; expected the file in its bundle"
        )
    form.require()
    specification = form.inputs(path) if entry is None else entry["inputs"]
    module = _module(path, model, manifest) if form.needs_class else None
    before = _memory()
    widths = network.get("widths")
    program = form.open(path, module) if not widths else form.open_width(path, len(widths) - 1)
    inputs = made_up(specification)
    times = latencies(program, inputs, repeats)
    after = _memory(peak=True)
    found = None if data is None else _score(program, data, manifest)
    return Checked(
        path, form.name, path.stat().st_size, repeats,
        1000 * median(times), 1000 * sorted(times)[min(len(times) - 1, int(0.95 * len(times)))],
        None if before is None or after is None else max(0, after - before),
        found, entry, [] if entry is None else _differences(network, entry, path, found),
    )  # fmt: skip


def _entry(manifest: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    for network in manifest.get("networks", []):
        for file in network["files"]:
            if file["file"] == path.name:
                return network, file
    return {}, None


def latencies(program: Program, inputs: Inputs, repeats: int) -> list[float]:
    """Seconds of each of some calls, after the first few."""
    for _ in range(WARM_UP):
        program(inputs)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        program(inputs)
        times.append(time.perf_counter() - started)
    return times


def _module(path: Path, model: str | None, manifest: Mapping[str, Any]) -> nn.Module:
    """The network at full size, into which the weights of a file are put."""
    words = manifest["model"] or {}
    name, advice = model or words.get("name"), "pass what builds it at full size: --model my_net.py:Net"
    if name is None:
        raise FedtailorError(f"{path} holds the weights of a network alone; {advice}")
    sizes = {"input_shape": tuple(words.get("input_shape", ())), "num_classes": words.get("num_classes", 0)}
    options = {} if model else words.get("options", {})
    try:
        return build_model(name, **sizes, symbols=words.get("symbols"), **options)
    except FedtailorError as error:
        raise FedtailorError(f"{path} holds the weights of a network alone; {advice} ({error})") from error


def _score(program: Program, data: str, manifest: Mapping[str, Any]) -> Score:
    task = TASKS.get(manifest["task"])
    if task is None or len(manifest["outputs"]) != 1:
        raise FedtailorError(
            f"--data {data}: what the outputs mean is known to the run alone ({manifest['task']}); leave it out"
        )
    dataset = load_dataset(data)
    test = as_given(dataset.test, deployable(dataset.train.preparation))
    if not manifest["preparation"].get("preparation"):
        test = dataset.test
    if len(test) > MOST_EXAMPLES:
        test = test.subset(torch.linspace(0, len(test) - 1, MOST_EXAMPLES).long())
    given = Inputs.of(test.take(torch.arange(1)))
    for each, tensor in zip(manifest["inputs"], given.flat, strict=False):
        if list(tensor.shape[1:]) != each["shape"][1:]:
            raise FedtailorError(
                f"--data {data}: its inputs have the shape {list(tensor.shape[1:])}, expected {each['shape'][1:]}"
            )
    metrics = {name: metric for name, metric in task.metrics.items() if name in manifest["metrics"]}
    return score(program, test, Meaning(task, metrics, manifest["labels"]))


def _differences(
    network: Mapping[str, Any], entry: Mapping[str, Any], path: Path, found: Score | None
) -> list[str]:
    """What the manifest says otherwise than what was measured."""
    said = []
    if path.stat().st_size != entry["size"]:
        said.append(f"size {path.stat().st_size:,} bytes, in the manifest {entry['size']:,}")
    expected = entry.get("score") or network["score"]
    if found is not None and expected is not None:
        for name, value in found.metrics.items():
            before = expected["metrics"].get(name)
            if before is not None and abs(before - value) > SAME_SCORE:
                said.append(f"{name} {value:.4f}, in the manifest {before:.4f}")
    return said


def _memory(peak: bool = False) -> int | None:
    """Bytes of this process now, from where on its peak is counted; or that peak."""
    status = Path("/proc/self/status")
    if not status.is_file():
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    if not peak:
        with suppress(OSError):  # where a process may not forget its peak, an older one is told
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    word = "VmHWM:" if peak else "VmRSS:"
    for line in status.read_text(encoding="ascii").splitlines():
        if line.startswith(word):
            return int(line.split()[1]) * 1024
    return None
