"""Files that once raised something else than a sentence, and a taste of ``make fuzz``, which reads a million more."""

from __future__ import annotations

import json
import random
import runpy
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.config import load_config
from fedtailor.data.formats.idx import read_idx
from fedtailor.data.formats.npz import read_npz
from fedtailor.deploying.bundle import MANIFEST, read_manifest
from fedtailor.errors import FedtailorError
from fedtailor.flower.device_file import read_device
from fedtailor.flower.server import _known
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.run.interface import run_config
from fedtailor.storage.files import CLIENTS
from fedtailor.storage.sparse_file import FORMAT, load_sparse

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
FUZZ = runpy.run_path(str(TOOLS / "fuzz_files.py"))
DEEP = "[" * 100_000
INPUTS = 6  # of each kind


@pytest.mark.parametrize("kind", [*FUZZ["KINDS"], *FUZZ["REPORTS"]])
def test_files_of_every_kind_are_read_and_mutated_ones_get_a_sentence(kind, tmp_path):
    """The tool itself demands that what is not mutated is read."""
    read, _, problems = FUZZ["fuzz"](kind, INPUTS, 60.0, seed=3)
    assert (read, problems) == (INPUTS, {})


def test_mutations_are_derived_from_their_seed():
    mutated = FUZZ["mutated"]
    data = bytes(range(100))
    assert mutated(data, random.Random("3")) == mutated(data, random.Random("3")) != data


def report_of(change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Callable[[Path], object]:
    def look(folder: Path) -> object:
        for name, content in change(dict(FUZZ["run_files"]())).items():
            (folder / name).write_bytes(content)
        return all_panels(read_runs([folder]))

    return look


def replaced(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def change(files: dict[str, bytes]) -> dict[str, bytes]:
        assert old in files[name]
        return {**files, name: files[name].replace(old, new)}

    return change


def sparse_file(folder: Path) -> object:
    values, about = {"b": np.zeros(2, np.float32)}, {"format": FORMAT, "shapes": "{}", "ties": '{"c": "a"}'}
    save_file(values, folder / "x.safetensors", metadata=about)
    return load_sparse(folder / "x.safetensors")


def empty_axis(folder: Path) -> object:
    sizes = (0, 2**32 - 1, 2**32 - 1)
    (folder / "x").write_bytes(b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in sizes))
    return read_idx(folder / "x")


def encrypted_archive(folder: Path) -> object:
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr("x_train.npy", bytes(200))
    data = bytearray((folder / "x.npz").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag that says so
    (folder / "x.npz").write_bytes(data)
    return read_npz(folder / "x.npz")


def written(name: str, text: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    def look(folder: Path) -> object:
        (folder / name).write_text(text, encoding="utf-8")
        return read(folder / name)

    return look


def run_of(file: Path) -> object:
    return run_config(load_config(file), file.parent / "run", on_notice=lambda _: None)


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (report_of(replaced("metrics.jsonl", b'"macs": 7', b'"mac5": 7')), "deployed"),
        (report_of(replaced("metrics.jsonl", b'"accuracy": 0.5', b'"4ccuracy": 0.5')), "tiers"),
        (report_of(replaced("coverage.jsonl", b'"channels"', b'"chann3ls"')), "does not fit its setup"),
        (report_of(replaced("setup.json", b'"groups": {"conv1"', b'"groups": {"conv2"')), "does not fit its setup"),
        (report_of(replaced("setup.json", b'"length": 4', b'"length": 4000000000')), "setup.json is damaged"),
        (written("x.toml", f'[data]\ndataset = "{"9" * 400}"', run_of), "unknown dataset"),
        (written("x.toml", f'[data]\ndataset = "{"9" * 400}.csv"', run_of), "no such file or folder"),
        (sparse_file, "ties name tensors that are not there"),
        (empty_axis, "holds nothing"),
        (encrypted_archive, "cannot be read as .npz"),
        (written(MANIFEST, DEEP, lambda file: read_manifest(file.parent)), "cannot be read"),
        (written("device.toml", f"memory = {DEEP}", read_device), "not valid TOML"),
        (written(CLIENTS, DEEP, lambda file: _known(file.parent)), "cannot be read"),
        (written(CLIENTS, json.dumps({"clients": {"a": "b"}}), lambda file: _known(file.parent)), "is damaged"),
    ],
)  # fmt: skip
def test_what_was_found_is_one_sentence(look, words, tmp_path):
    with pytest.raises(FedtailorError, match=words):
        look(tmp_path)


def test_a_seed_that_is_a_table_hides_no_report(tmp_path):
    assert report_of(replaced("config.toml", b"seed = 3", b"seed.x = 3"))(tmp_path)
