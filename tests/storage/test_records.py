"""A record is what it was after it has been written and read, whichever of the three files a field stands in."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch

import fedtailor
from fedtailor.methods.registry import get_method
from fedtailor.record import Best, Cohort, Covered, RoundRecord, Simulated, Spent, TierSpent
from fedtailor.storage.checkpoint import Checkpoint, settle
from fedtailor.storage.journal import CheckpointSettings, Journal
from fedtailor.storage.run_folder import RunFolder
from helpers import image_data, mlp_model, tiny_cnn

FULL = RoundRecord(
    round=1,
    cohort=Cohort(
        5, 3, {"late": 1, "non-finite": 1}, 2, 4, 6, {"7": {"late": 1}, "9": {"non-finite": 1}}, measured_on=3
    ),
    training=Spent(10, 20, 30),
    measuring=Spent(1, 2, 3),
    by_tier={"0.5": TierSpent(4, 8, 12, 2, 1, 16, 20), "1": TierSpent(6, 12, 18, 3, 2, 24, 28)},
    train_loss=0.1,
    tiers={"0.5": {"loss": 1.25, "accuracy": 0.5}, "1": {"loss": 1.0, "accuracy": 1 / 3}},
    validation={"0.5": {"loss": 1.5, "accuracy": 0.25}, "1": {"loss": 1.125, "accuracy": 0.75}},
    best_round=1,
    deployed={"0.5": {"params": 7, "macs": 8}},
    reported={"3": {"cosine": 0.25}},
    method={"stage": "search", "supported": ["1", "1/2"]},
    coverage=(Covered(2, {"channels": {"0": 4, "4": "0-2,5"}}), Covered(1, {"channels": {}}, ("base1",))),
    seconds=0.125,
    failed={"KeyError: 'label'": ("7", "9")},
    simulated=Simulated(12.5, 3.25, 1.5, {"phone": {"asked": 2, "answered": 1, "seconds": 20.5}}),
    merge={"clipped": [3], "unheard": [7, 9]},
    privacy={"releases": 1, "delta": 1e-5, "epsilon": {"0.5": 1.5, "1": 2.25}},
)


ELSEWHERE = {"audit"}  # written to the signed log alone


def test_the_full_record_is_full():
    """No field of it, nor of its parts, has the value that it would have by itself."""
    for record in (FULL, FULL.cohort, FULL.training, FULL.measuring, FULL.by_tier["1"], FULL.simulated):
        plain = type(record)(0) if isinstance(record, RoundRecord) else type(record)()
        assert [
            item.name
            for item in fields(record)
            if getattr(record, item.name) == getattr(plain, item.name) and item.name not in ELSEWHERE
        ] == []


@pytest.mark.parametrize("record", [FULL, RoundRecord(1)], ids=["full", "empty"])
def test_what_was_written_is_read_back_field_by_field(tmp_path, record):
    at = Checkpoint(settle(get_method("fedavg")().init(mlp_model())))
    with Journal.create(tmp_path / "run", {}) as journal:
        journal.begin({}, CheckpointSettings(), at, torch.device("cpu"))
        ended = replace(at, state=replace(at.state, round=1), best=Best(1, 0.5))
        journal.record(record, ended)
    (found,) = RunFolder(tmp_path / "run").records()
    for item in fields(RoundRecord):
        assert getattr(found, item.name) == getattr(record, item.name), item.name
    with Journal.open(tmp_path / "run") as journal:
        journal.begin({}, CheckpointSettings(), at, torch.device("cpu"))
        assert journal.history == [record]


@pytest.mark.parametrize("method", ["heterofl", "feduniform", "splitmix", "apfl"])
def test_the_history_of_a_run_is_what_its_folder_holds(tmp_path, method):
    shown: list[RoundRecord] = []
    run = fedtailor.train(
        tiny_cnn(), image_data((6, 5, 7, 4)), "uniform-2", method, rounds=3, clients_per_round=4, evaluate_every=2,
        engine={"workers": 0}, folder=tmp_path / "run", on_round=shown.append,
    )  # fmt: skip
    assert list(run.history) == shown == RunFolder(tmp_path / "run").records()
    assert all(record.coverage for record in shown)


def test_rounds_that_are_done_again_have_one_line_of_coverage(tmp_path):
    at = Checkpoint(settle(get_method("fedavg")().init(mlp_model())))
    settings = CheckpointSettings(every=2)
    with Journal.create(tmp_path / "run", {}) as journal:
        journal.begin({}, settings, at, torch.device("cpu"))
        for round in (1, 2, 3):
            journal.record(replace(FULL, round=round), replace(at, state=replace(at.state, round=round)))
    with Journal.open(tmp_path / "run") as journal:
        journal.begin({}, settings, at, torch.device("cpu"))
        assert journal.at.state.round == 2
        journal.record(replace(FULL, round=3), replace(at, state=replace(at.state, round=3)))
    lines = (tmp_path / "run/coverage.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[0])["coverage"][0] == {
        "count": 2, "cut": {"channels": {"0": 4, "4": "0-2,5"}}, "tags": [],
    }  # fmt: skip


def test_a_row_of_an_older_version_lacks_what_was_not_counted_then():
    row = {"round": 2, "clients": 3, "merged": 2, "bytes_down": 5, "bytes_up": 4, "macs": 9}
    assert RoundRecord.from_row(row) == RoundRecord(2, Cohort(3, 2), Spent(5, 4, 9))


def test_a_row_of_a_newer_version_is_read_without_what_is_not_known_yet():
    row = FULL.as_row()
    tiers = {tier: {**each, "joules": 7} for tier, each in row["by_tier"].items()}
    newer = {**row, "energy": 5, "measuring": {**row["measuring"], "joules": 7}, "by_tier": tiers}
    assert RoundRecord.from_row(newer) == RoundRecord.from_row(row)


def test_the_row_is_flat_and_its_keys_are_those_of_earlier_folders():
    row = FULL.as_row()
    assert list(row) == [
        "round", "clients", "merged", "refused", "refused_by", "abandoned", "resting", "too_small",
        "measured_on", "bytes_down",
        "bytes_up", "macs", "measuring", "by_tier", "train_loss", "tiers", "validation", "best_round", "deployed",
        "reported", "method", "merge", "simulated", "privacy",
    ]  # fmt: skip
    assert row["measuring"] == {"bytes_down": 1, "bytes_up": 2, "macs": 3}
    assert row["by_tier"]["0.5"] == {
        "bytes_down": 4, "bytes_up": 8, "macs": 12, "asked": 2, "answered": 1, "examples": 16, "parameters": 20,
    }  # fmt: skip
    without = [
        key for key in list(row)[:15] if key not in ("too_small", "measured_on", "by_tier", "refused_by")
    ]
    assert list(RoundRecord(1).as_row()) == without
