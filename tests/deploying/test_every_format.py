"""Every format, of every kind of network and of every method: a fresh process without fedtailor runs the file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import BUILDERS, finished

import fedtailor
from fedtailor.deploying.bundle import deploy
from fedtailor.deploying.formats import FORMATS
from fedtailor.deploying.network import TOLERANCE, Network, network_for
from fedtailor.deploying.wanted import Wanted
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.methods.registry import method_names

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LIBRARY = {"onnx": "onnxruntime", "pte": "executorch"}
ALL = tuple(each for each in FORMATS if each != "sparse")  # of masks of single weights, tested by itself
HALF = Budget(width=0.5)

# How each method is asked for; those whose clients have networks of their own deploy that of a client too.
METHODS: dict[str, dict[str, Any]] = {
    "apfl": {"warmup": 1, "per_group": True},
    "fedcs": {"warmup": 1, "search_at_once": 2},
    "federated-dropout": {"keep": 0.5},
    "flado": {"sketch": 64},
    "flanc": {"widths": [0.5, 1]},
    "ofa-fl": {"ratios": (1, "1/5"), "trigger": "schedule", "first": 0},
    "splitmix": {"base": 0.25},
}
OWN_NETWORKS = ("apfl", "fedcs", "fedpa", "feduniform")


def missing() -> list[str]:
    return [FORMATS[name].extra for name, library in LIBRARY.items() if not importlib.util.find_spec(library)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"pip install 'fedtailor[{','.join(missing())}]'"),
]


def differences(network: Network, files: list[Path], folder: Path, model: Any) -> dict[str, float]:
    """How far the answers of files in a fresh process are from those of the training form."""
    values = {f"input_{place}": each.numpy() for place, each in enumerate(network.example.flat)}
    values |= {f"expected_{place}": each.numpy() for place, each in enumerate(network.expected)}
    np.savez(folder / "values.npz", **values)
    plain = not model[0].startswith("fedtailor")
    found: dict[str, float] = {}
    for with_class in (False, True):
        here = [str(file) for file in files if (file.suffix == ".safetensors") == with_class]
        asked = {
            "path": [str(EXAMPLES), str(HERE), *([] if plain else [str(Path(fedtailor.__file__).parents[1])])],
            "without_fedtailor": plain or not with_class,
            "values": str(folder / "values.npz"), "files": here, "model": model,
        }  # fmt: skip
        if not here:
            continue
        (folder / "asked.json").write_text(json.dumps(asked))
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, str(HERE / "fresh.py"), str(folder / "asked.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean, cwd=folder)
        assert done.returncode == 0, done.stderr
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


MODELS: dict[str, Any] = {
    "bert": ["plain_encoder", "Encoder", {}],
    "cnn": [
        "fedtailor.models",
        "build_model",
        {"name": "cnn", "input_shape": [1, 8, 8], "num_classes": 4, "channels": [8, 8]},
    ],
    "resnet": [
        "fedtailor.models",
        "build_model",
        {"name": "heterofl-resnet", "input_shape": [1, 8, 8], "num_classes": 4, "widths": [8] * 4, "stem": 8},
    ],
    "mobilenet": [
        "fedtailor.models",
        "build_model",
        {"name": "mobilenetv2", "input_shape": [1, 8, 8], "num_classes": 4, "width": 0.25, "last": 16},
    ],
    "lstm": [
        "fedtailor.models",
        "build_model",
        {"name": "char-lstm", "input_shape": [5], "num_classes": 20, "hidden": 8},
    ],
    "vit": [
        "fedtailor.models",
        "build_model",
        {"name": "vit", "input_shape": [1, 8, 8], "num_classes": 4, "embedding": 16, "hidden": 24, "depth": 1},
    ],
}  # fmt: skip


def show(name: str, found: dict[str, float]) -> None:
    print(f"\n{name}: " + ", ".join(f"{suffix} {value:.1e}" for suffix, value in sorted(found.items())))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_fresh_process_without_fedtailor_runs_every_format(name, tmp_path):
    run = finished(name, "heterofl")
    written = deploy(run, Wanted(HALF, formats=ALL), tmp_path / "bundle")
    network = network_for(run, "half", HALF)
    files = [written.folder / each["file"] for each in written.networks[0]["files"]]
    found = differences(network, files, tmp_path, MODELS[name])
    show(name, found)
    assert found.keys() == {".safetensors", ".pt2", ".onnx", ".pte"}
    assert max(found.values()) <= TOLERANCE
    assert (
        written.networks[0]["macs"]
        == run.model.cost(network.patches[0].cut).macs
        < run.model.cost(type(network.patches[0].cut).everything()).macs
    )


@pytest.mark.parametrize("method", method_names())
def test_every_method_deploys_to_every_format(method, tmp_path):
    options = METHODS.get(method, {})
    if method == "fedpa":
        groups = finished("cnn").model.groups
        sizes = {group: groups.counts[group] // 2 for group in groups.elastic}
        options = {"architectures": {str(client): sizes for client in range(4)}}
    fleet = "uniform-2" if method != "splitmix" else "uniform-4"
    run = finished("cnn", {"name": method, **options}, fleet, rounds=3)
    budget = run.fleet.tiers[-2].budget
    own = method in OWN_NETWORKS and run.method.policy.kept_by_clients
    wanted = Wanted(client=0, formats=ALL) if own else Wanted(budget, formats=ALL)
    written = deploy(run, wanted, tmp_path / "bundle")
    network = network_for(run, "x", client=0) if own else network_for(run, "x", budget)
    (entry,) = written.networks
    found = differences(
        network, [written.folder / f["file"] for f in entry["files"]], tmp_path, MODELS["cnn"]
    )
    show(f"{method} ({len(network.patches)} network{'s' if len(network.patches) > 1 else ''})", found)
    assert max(found.values()) <= TOLERANCE
    if method == "splitmix":
        assert len(network.patches) == 3


@pytest.mark.parametrize("form", FORMATS)
def test_int8_is_smaller_and_what_it_costs_is_measured(form, tmp_path):
    run = finished("cnn", rounds=10)
    plain = deploy(run, Wanted(Budget(width=1), formats=(form,)), tmp_path / "bundle").networks[0]
    small = deploy(
        run, Wanted(Budget(width=1), formats=(form,), quantize="int8"), tmp_path / "bundle"
    ).networks[0]
    (before,), (after,) = plain["files"], small["files"]
    print(form, before["size"], after["size"], plain["score"]["metrics"], after["score"]["metrics"])
    assert after["file"] != before["file"]
    assert after["score_before"] == plain["score"]["metrics"]
    assert abs(after["score"]["metrics"]["accuracy"] - plain["score"]["metrics"]["accuracy"]) <= 0.1
    assert plain["score"]["metrics"]["accuracy"] > 0.5  # there is something to lose
