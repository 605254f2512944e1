"""The bits of every method's small runs are those that were recorded: a change that moves them must be meant to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from fedtailor.methods.registry import method_names
from golden.runs import NETWORKS, RUNS, Outcome, golden_run, machine_key

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-4  # of a tensor's sum of absolute values, on machines whose rounding was never recorded ...
PER_NUMBER = 1e-5  # ... and this for each of its numbers: rounding may prune one weight instead of its equal


def test_every_method_is_recorded_on_every_network():
    assert {method for method, _ in RUNS.values()} == set(method_names())
    assert RECORDED.keys() == {f"{name}/{kind}" for name in RUNS for kind in NETWORKS}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", RUNS)
def test_golden_bits(name, kind):
    compare(golden_run(name, kind), RECORDED[f"{name}/{kind}"], machine_key())


def compare(outcome: Outcome, recorded: dict, key: str) -> None:
    """Bit for bit where this kind of machine was recorded, or one with the same bits; else sums, and a warning."""
    found = [outcome.weights_hash, outcome.rows_hash]
    if key in recorded["hashes"]:
        assert found == recorded["hashes"][key]
    if found in recorded["hashes"].values():
        return
    warnings.warn(f"no golden bits for {key}: sums per tensor are compared instead", stacklevel=2)
    assert outcome.sums.keys() == recorded["sums"].keys()
    for name, (total, size) in outcome.sums.items():
        expected, expected_size = recorded["sums"][name]
        allowed = TOLERANCE * max(1.0, expected_size) + PER_NUMBER * outcome.weights[name].numel()
        assert abs(total - expected) <= allowed, name
        assert abs(size - expected_size) <= allowed, name


def test_another_machine_is_compared_by_sums_and_a_moved_tensor_is_found():
    outcome, recorded = golden_run("fedavg", "plain"), {**RECORDED["fedavg/plain"], "hashes": {}}
    with pytest.warns(UserWarning, match="no golden bits for torch 1.0, an abacus"):
        compare(outcome, recorded, "torch 1.0, an abacus")
    moved = {name: value.clone() for name, value in outcome.weights.items()}
    moved["0.weight"].view(-1)[0] += 0.01
    with pytest.warns(UserWarning, match="no golden bits"), pytest.raises(AssertionError, match="0.weight"):
        compare(Outcome(moved, outcome.rows), recorded, "torch 1.0, an abacus")
    with pytest.raises(AssertionError):
        compare(
            Outcome(moved, outcome.rows),
            {"hashes": {"here": [outcome.weights_hash, outcome.rows_hash]}},
            "here",
        )
