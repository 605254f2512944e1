"""Whole runs with workers: folders, resume, Ctrl-C, and what is said at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedtailor
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.record import Cohort, RoundRecord
from fedtailor.report.tables import totals
from fedtailor.run.summary import run_summary
from helpers import CLASSES, differing, image_data, tiny_cnn

SETTINGS = {
    "fleet": "uniform-2",
    "method": "heterofl",
    "rounds": 4,
    "clients_per_round": 3,
    "evaluate_every": 2,
    "training": {"batch_size": 4},
}


class Stop(Exception):  # noqa: N818
    pass


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_workers(tmp_path):
    whole = fedtailor.train(tiny_cnn(), image_data(), **SETTINGS, engine={"workers": 0})

    def stop(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        fedtailor.train(
            tiny_cnn(),
            image_data(),
            **SETTINGS,
            engine={"workers": 0},
            folder=tmp_path / "run",
            on_round=stop,
        )
    rest = fedtailor.train(
        tiny_cnn(), image_data(), **SETTINGS, engine={"workers": 1}, folder=tmp_path / "run", resume=True
    )
    assert differing(whole.state.weights, rest.state.weights) == set()
    assert whole.tiers == rest.tiers
    assert [record.train_loss for record in whole.history] == [record.train_loss for record in rest.history]


class OneSize(torch.nn.Module):
    """Its ``forward`` is written for one width, so that the traced graph stands in for it."""

    def __init__(self):
        super().__init__()
        self.conv, self.token = torch.nn.Conv2d(1, 6, 3), torch.nn.Parameter(torch.zeros(1, 6))
        self.head = torch.nn.Linear(12, CLASSES)

    def forward(self, x):
        pooled = torch.nn.functional.adaptive_avg_pool2d(self.conv(x), 1).view(-1, 6)
        return self.head(torch.cat([pooled.relu(), self.token.expand(len(x), -1)], dim=1))


@pytest.mark.slow
def test_workers_run_the_graph_that_stands_in_for_a_module_of_one_size():
    torch.manual_seed(0)
    module = OneSize()
    here, there = (
        fedtailor.train(module, image_data(), **SETTINGS, engine={"workers": count}) for count in (0, 2)
    )
    assert not here.model.own_class
    assert differing(here.state.weights, there.state.weights) == set()
    assert here.tiers == there.tiers


def test_other_rules_are_another_run(tmp_path):
    fedtailor.train(tiny_cnn(), image_data(), **SETTINGS, engine={"workers": 0}, folder=tmp_path / "run")
    with pytest.raises(fedtailor.FedtailorError, match="engine.quorum: saved 0.25, now 0.5"):
        fedtailor.train(
            tiny_cnn(), image_data(), **SETTINGS, engine={"quorum": 0.5}, folder=tmp_path / "run", resume=True
        )


def test_what_cannot_travel_is_refused_before_anything_is_written(tmp_path):
    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, batch[-1])

    with pytest.raises(NotPortable, match="objective cannot be sent to worker processes"):
        fedtailor.train(
            tiny_cnn(), image_data(), **SETTINGS, loss=loss, engine={"workers": 2}, folder=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_the_end_of_a_run_says_what_was_refused():
    run = fedtailor.train(tiny_cnn(), image_data(), **SETTINGS, engine={"workers": 0})
    summary = run_summary(run)
    assert (summary["refused"], summary["abandoned"], summary["resting"]) == ({}, 0, 0)
    records = [
        RoundRecord(1, Cohort(refused={"late": 2, "absurd-step": 1}, abandoned=1, resting=0)),
        RoundRecord(2, Cohort(refused={"late": 1}, abandoned=2, resting=4)),
    ]
    total = totals(records)
    assert (total["refused"], total["abandoned"], total["resting"]) == ({"absurd-step": 1, "late": 3}, 3, 4)


CONFIG = """
name = "run"
rounds = 10000
clients_per_round = 4
evaluate_every = 5
[data]
dataset = "digits"
clients = 8
[model]
name = "cnn"
channels = [8, 16]
[method]
name = "fedavg"
[engine]
workers = 2
"""


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(number) for number in listed.split()]


@pytest.mark.slow
def test_ctrl_c_finishes_the_round_and_leaves_no_worker(tmp_path):
    """The terminal sends it to all processes of the foreground; only the parent may take it to heart."""
    config = tmp_path / "config.toml"
    config.write_text(CONFIG, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "fedtailor", "run", str(config), "--runs", str(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.1)
    workers = children_of(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "fedtailor resume" in errors
    assert "worker-died" not in metrics.read_text(encoding="utf-8")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
