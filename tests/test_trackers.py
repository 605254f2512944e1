"""Trackers: what each library is told, and what happens when it is not there."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.record import Cohort, RoundRecord, Spent, TierSpent
from fedtailor.trackers import tracking

RECORDS = [
    RoundRecord(1, Cohort(2, 1, {"late": 1}), Spent(5, 3, 70), seconds=0.5),
    RoundRecord(
        2,
        Cohort(2, 2),
        Spent(5, 3, 70),
        Spent(4, 2, 9),
        1.5,
        {"1": {"accuracy": 0.5}},
        2,
        seconds=0.25,
        deployed={"1": {"macs": 8, "params": 7}},
        reported={"3": {"cosine": 0.25}},
        by_tier={"1": TierSpent(5, 3, 70, 2, 2, 6, 7)},
        method={"stage": "search", "rank": 3, "shares": [0.5, 1.0], "widths": {"3": 4}},
    ),
]
FIRST = {
    "clients": 2, "merged": 1, "abandoned": 0, "resting": 0, "bytes_down": 5, "bytes_up": 3, "macs": 70, "seconds": 0.5,
    "measuring/bytes_down": 0, "measuring/bytes_up": 0, "measuring/macs": 0, "refused/late": 1,
}  # fmt: skip
SECOND = {
    **FIRST, "merged": 2, "seconds": 0.25, "train_loss": 1.5, "best_round": 2, "tier/1/accuracy": 0.5,
    "measuring/bytes_down": 4, "measuring/bytes_up": 2, "measuring/macs": 9, "deployed/1/macs": 8,
    "deployed/1/params": 7, "method/rank": 3,
}  # fmt: skip
del SECOND["refused/late"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand-ins with the calls that the three libraries document."""
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            Path(folder).mkdir(parents=True)  # as the real one does

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append(("tensorboard", name, value, step))

        def add_text(self, name: str, text: str) -> None:
            calls.append(("tensorboard text", name, text))

        def close(self) -> None:
            calls.append(("tensorboard closed",))

    class WandbRun:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("wandb", values, step))

        def finish(self) -> None:
            calls.append(("wandb closed",))

    @contextmanager
    def start_run(run_name: str):
        yield
        calls.append(("mlflow closed", run_name))

    board, wandb, mlflow = ModuleType("torch.utils.tensorboard"), ModuleType("wandb"), ModuleType("mlflow")
    board.SummaryWriter = Writer
    wandb.init = lambda **settings: calls.append(("wandb init", settings["name"])) or WandbRun()
    mlflow.start_run = start_run
    mlflow.log_params = lambda values: calls.append(("mlflow settings", values))
    mlflow.log_metrics = lambda values, step: calls.append(("mlflow", values, step))
    for module in (board, wandb, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_every_tracker_is_told_every_round_and_closed(told, tmp_path):
    shown = []
    names = ["tensorboard", "wandb", "mlflow"]
    with tracking(names, tmp_path / "run", {"seed": "3"}, shown.append) as on_round:
        assert not (tmp_path / "run").exists()  # a run makes its own folder, before the first record
        (tmp_path / "run").mkdir()
        for record in RECORDS:
            on_round(record)
    assert shown == RECORDS
    assert ("tensorboard", "tier/1/accuracy", 0.5, 2) in told
    assert ("wandb", SECOND, 2) in told
    assert ("mlflow", FIRST, 1) in told
    assert ("mlflow settings", {"seed": "3"}) in told
    assert {"tensorboard closed", "wandb closed", "mlflow closed"} <= {call[0] for call in told}


def test_trackers_are_closed_when_a_run_fails(told, tmp_path):
    def run_that_fails() -> None:
        with tracking(["wandb"], tmp_path, {}, lambda record: None) as on_round:
            on_round(RECORDS[0])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run_that_fails()
    assert ("wandb closed",) in told


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_what_is_not_installed_is_named_before_the_run(monkeypatch, tmp_path, name):
    from fedtailor.trackers import MODULES

    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with (
        pytest.raises(FedtailorError, match=rf"fedtailor\[track-{name}\]"),
        tracking([name], tmp_path, {}, print),
    ):
        pass


def test_a_misspelt_tracker(tmp_path):
    with pytest.raises(FedtailorError, match="did you mean 'wandb'"), tracking(["wanb"], tmp_path, {}, print):
        pass
