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
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.methods.registry import method_names
from helpers import kind_of

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LIBRARY = {"onnx": "onnxruntime", "pte": "executorch"}
ALL = tuple(each for each in FORMATS if each != "sparse")  # of masks of single weights, tested by itself
HALF = Budget(width=0.5)

# How each method is asked for; those whose clients have networks of their own deploy that of a client.
METHODS: dict[str, dict[str, Any]] = {
    "apfl": {"warmup": 1, "per_group": True},
    "fedcs": {"warmup": 1, "search_at_once": 2},
    "federated-dropout": {"keep": 0.5},
    "flado": {"sketch": 64},
    "flanc": {"widths": [0.5, 1]},
    "ofa-fl": {"ratios": (1, "1/5"), "trigger": "schedule", "first": 0},
    "splitmix": {"base": 0.25},
}


def missing() -> list[str]:
    return [FORMATS[name].extra for name, library in LIBRARY.items() if not importlib.util.find_spec(library)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"pip install 'fedtailor[{','.join(missing())}]'"),
]


Case = dict[str, Any]  # a file, the values that it is compared on, and the class for weights alone


def cases_of(network: Network, entry: dict[str, Any], folder: Path, model: Any) -> list[Case]:
    """The files of a network, for a fresh process."""
    values = {f"input_{place}": each.numpy() for place, each in enumerate(network.example.flat)}
    values |= {f"expected_{place}": each.numpy() for place, each in enumerate(network.expected)}
    np.savez(folder / "values.npz", **values)
    files = [str(folder / "bundle" / each["file"]) for each in entry["files"]]
    return [{"file": file, "values": str(folder / "values.npz"), "model": model} for file in files]


def differences(cases: list[Case], folder: Path) -> list[float]:
    """How far answers in a fresh process are from the training form; only weights for its classes meet fedtailor."""
    with_class = [case["file"].endswith(".safetensors") and "fedtailor" in case["model"][0] for case in cases]
    found: dict[str, float] = {}
    for meets in (False, True):
        here = [case for case, needed in zip(cases, with_class, strict=True) if needed == meets]
        paths = [
            str(EXAMPLES),
            str(HERE),
            str(HERE.parent),
            *([str(Path(fedtailor.__file__).parents[1])] if meets else []),
        ]
        asked = {"path": paths, "without_fedtailor": not meets, "cases": here}
        (folder / "asked.json").write_text(json.dumps(asked))
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, str(HERE / "fresh.py"), str(folder / "asked.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean, cwd=folder)
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout.splitlines()[-1])
        found |= {case["file"]: value for case, value in zip(here, answers, strict=True)}
    return [found[case["file"]] for case in cases]


MODELS: dict[str, Any] = {
    "bert": ["plain_encoder", "Encoder", {}],
    "adapted": ["odd_networks", "adapted", {"input_shape": [1, 8, 8], "num_classes": 4}],
    "deep": ["odd_networks", "deep", {"input_shape": [1, 8, 8], "num_classes": 4}],
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


def show(name: str, cases: list[Case], found: list[float]) -> None:
    told = [f"{Path(case['file']).suffix} {value:.1e}" for case, value in zip(cases, found, strict=True)]
    print(f"\n{name}: {', '.join(told)}")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_fresh_process_without_fedtailor_runs_every_format(name, tmp_path):
    run = finished(name, "heterofl")
    (entry,) = deploy(run, Wanted(HALF, formats=ALL), tmp_path / "bundle").networks
    network = network_for(run, "half", HALF)
    cases = cases_of(network, entry, tmp_path, MODELS[name])
    found = differences(cases, tmp_path)
    show(name, cases, found)
    assert [Path(case["file"]).suffix for case in cases] == [".safetensors", ".pt2", ".onnx", ".pte"]
    assert max(found) <= TOLERANCE
    assert entry["macs"] == run.model.cost(network.patches[0].cut).macs
    assert entry["macs"] < run.model.cost(Cut.everything()).macs


DEPLOYED: dict[str, list[Case]] = {}  # by the test below, for the one after it


@pytest.mark.parametrize("method", method_names())
def test_every_method_deploys_to_every_format(method, tmp_path_factory):
    """Every file is run here and compared with the training form: ``deploy`` refuses others."""
    options = METHODS.get(method, {})
    if method == "fedpa":
        groups = finished("cnn").model.groups
        sizes = {group: groups.counts[group] // 2 for group in groups.elastic}
        options = {"architectures": {str(client): sizes for client in range(4)}}
    kind = kind_of(method).replace("plain", "cnn")
    run = finished(
        kind, {"name": method, **options}, "uniform-4" if method == "splitmix" else "uniform-2", rounds=3
    )
    budget, own = run.fleet.tiers[-2].budget, run.method.policy.kept_by_clients
    wanted = Wanted(client=0, formats=ALL) if own else Wanted(budget, formats=ALL)
    folder = tmp_path_factory.mktemp(method)
    (entry,) = deploy(run, wanted, folder / "bundle").networks
    network = network_for(run, "x", client=0) if own else network_for(run, "x", budget)
    DEPLOYED[method] = cases_of(network, entry, folder, MODELS[kind])
    print(
        f"\n{method}, {len(network.patches)} member(s), {'client 0' if own else budget}: in this process",
        end=" ",
    )
    print({each["format"]: f"{each['difference']:.1e}" for each in entry["files"]})
    assert len(entry["files"]) == len(ALL)
    assert len(network.patches) == (3 if method == "splitmix" else 1)


def test_a_fresh_process_runs_what_every_method_deployed(tmp_path):
    assert DEPLOYED, "the test above runs first"
    cases = [case for each in DEPLOYED.values() for case in each]
    found = differences(cases, tmp_path)
    for place, (method, own) in enumerate(DEPLOYED.items()):
        show(method, own, found[place * len(ALL) : (place + 1) * len(ALL)])
    assert len(cases) == len(DEPLOYED) * len(ALL)
    assert max(found) <= TOLERANCE


@pytest.mark.parametrize("form", ALL)
def test_int8_is_smaller_and_what_it_costs_is_measured(form, tmp_path):
    training = {"lr": 0.05, "momentum": 0.9, "batch_size": 4, "epochs": 5}
    run = finished("wide", "fedavg", "equal", rounds=2, training=training)
    plain = deploy(run, Wanted(Budget(width=1), formats=(form,)), tmp_path / "bundle").networks[0]
    small = deploy(
        run, Wanted(Budget(width=1), formats=(form,), quantize="int8"), tmp_path / "bundle"
    ).networks[0]
    (before,), (after,) = plain["files"], small["files"]
    print(form, before["size"], after["size"], plain["score"]["metrics"], after["score"]["metrics"])
    assert after["file"] != before["file"]
    assert after["size"] < 0.4 * before["size"]
    assert after["score_before"] == plain["score"]["metrics"]
    assert abs(after["score"]["metrics"]["accuracy"] - plain["score"]["metrics"]["accuracy"]) <= 0.1
    assert plain["score"]["metrics"]["accuracy"] > 0.7  # there is something to lose
