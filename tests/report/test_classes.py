"""Which classes are got right, and whose updates were refused: counted by the run, shown by the report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedtailor import train
from fedtailor.data.batches import target_of
from fedtailor.record import Cohort
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.storage.run_folder import CONFUSION
from helpers import CLASSES, tiny_mlp, vector_data, with_nan_inputs
from synthetic_runs import write_records, write_run

SMALL = {"rounds": 1, "fleet": "uniform-2", "clients_per_round": 6, "evaluate_every": 1}


def panels_of(*folders):
    return {each.key: each for each in all_panels(read_runs(folders))}


def test_the_matrix_is_what_the_networks_answer(tmp_path):
    data = vector_data()
    run = train(tiny_mlp(), data, method="heterofl", folder=tmp_path / "run", **SMALL)
    found = json.loads((tmp_path / "run" / CONFUSION).read_text())
    assert found["examples"] == len(data.test)
    inputs, labels = data.test.take(torch.arange(len(data.test)))
    for tier in run.fleet.tiers:
        answers = run.submodel(tier.budget)(inputs).argmax(-1)
        wanted = [[0] * CLASSES for _ in range(CLASSES)]
        for label, answer in zip(labels.tolist(), answers.tolist(), strict=True):
            wanted[label][answer] += 1
        assert found["tiers"][tier.name] == wanted
        right = sum(found["tiers"][tier.name][c][c] for c in range(CLASSES))
        assert right / len(labels) == pytest.approx(run.tiers[tier.name]["accuracy"])


def test_answers_that_are_no_classes_have_no_matrix(tmp_path):
    def squared(output, batch):
        return F.mse_loss(output[:, 0], target_of(batch).float())

    metrics = {"off": lambda output, batch: float((output[:, 0] - target_of(batch)).abs().mean())}
    folder = tmp_path / "run"
    train(tiny_mlp(), vector_data(), method="fedavg", folder=folder, loss=squared, metrics=metrics, **SMALL)
    assert not (folder / CONFUSION).exists()
    assert "classes" not in panels_of(folder)


def test_the_report_adds_the_matrices_of_all_seeds(tmp_path):
    tables = ([[8, 2], [0, 0]], [[4, 6], [0, 0]])  # nothing of the second class in the test data
    for seed, table in enumerate(tables, start=1):
        place = write_run(tmp_path / f"{seed}", "fjord", 0.9, seed, 2)
        found = {"examples": 10, "names": ["cat", "dog"], "tiers": {"0.2": table}}
        (place / CONFUSION).write_text(json.dumps(found))
    panel = panels_of(tmp_path)["classes"]
    right, matrix = panel.charts
    assert right.data == [{"method": "fjord", "tier": "0.2", "class": "cat", "accuracy": 60}]
    assert [(row["class"], row["answer"], row["share"]) for row in matrix.data] == [
        ("cat", "cat", 60),
        ("cat", "dog", 40),
    ]
    ((_, (row,)),) = panel.tables
    assert (row["hardest class"], row["recognised"], row["taken for"]) == ("cat", "60.0 %", "dog (40.0 %)")


def test_refused_updates_are_told_by_client_and_reason(tmp_path):
    """Client 2 has no numbers to train on: every update of it is refused."""
    data = with_nan_inputs(vector_data(), client=2)
    folder = tmp_path / "run"
    train(tiny_mlp(), data, method="fedavg", folder=folder, **{**SMALL, "rounds": 2, "evaluate_every": 2})
    panel = panels_of(folder)["refused"]
    ((_, (row,)),) = panel.tables
    assert (row["client"], row["times"]) == ("2", 2)
    assert "fedavg: 2 refused, 12 updates were asked for." in panel.text


def test_no_refusal_no_panel_and_those_of_earlier_versions_are_counted(tmp_path):
    place = write_run(tmp_path / "run", "fjord", 0.9, 1, 3)
    assert "refused" not in panels_of(place)
    (run,) = read_runs([place])
    write_records(place, [replace(run.records[0], cohort=Cohort(10, 9, {"late": 1}))])
    panel = panels_of(place)["refused"]
    assert panel.text == "fjord: 1 refused, 10 updates were asked for."
    assert not panel.tables
