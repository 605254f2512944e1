"""A client whose code raises is dropped as ``failed`` and named; only if nobody gets through does the run stop."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_faults import SIZES, Losing

import fedtailor
from commands import call
from fedtailor.data.batches import Examples
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import ClientsFailedError, FedtailorError
from fedtailor.method import Method
from fedtailor.methods.apfl.fedpa import FedPA
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.storage.run_folder import RunFolder
from helpers import cnn_model, differing, image_data, run, tiny_mlp, vector_data

LONG = "x" * 100_000


@dataclass(frozen=True)
class Raising(Method):
    """Plain averaging, in which some clients raise, in some of the things that they are asked for."""

    who: tuple[int, ...] = (2,)
    error: Any = field(default_factory=lambda: KeyError("label"))
    action: str = "train"

    def perform(self, task, data, model):
        if task.client.id in self.who and task.action == self.action:
            raise self.error
        return super().perform(task, data, model)


ERRORS = [
    (KeyError("label"), "KeyError: 'label'"),
    (IndexError("Target 9 is out of bounds."), "IndexError: Target 9 is out of bounds."),
    (MemoryError(), "MemoryError"),
    (RuntimeError("shape"), "RuntimeError: shape"),
    (AssertionError(), "AssertionError"),
    (RecursionError("deep"), "RecursionError: deep"),
    (FedtailorError("training.lr = 3: expected less"), "training.lr = 3: expected less"),
    (ValueError(LONG), f"ValueError: {LONG[:500]}"),
    (ValueError("one\ntwo\x1b[31m"), "ValueError: one two [31m"),
]


@pytest.mark.parametrize(("error", "told"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_one_clients_exception_costs_this_client_alone(error, told):
    method, data = Raising(error=error), image_data(SIZES)
    bad = run(method, cnn_model(), data, rounds=4, every=2)
    without = run(
        get_method("fedavg")(), cnn_model(), data, rounds=4, every=2,
        engine=lambda inner: Losing(inner, {number: [2] for number in range(4)}),
    )  # fmt: skip
    assert differing(bad.state.weights, without.state.weights) == set()
    for record in bad.records:
        assert record.cohort.refused == {"failed": 1}
        assert record.cohort.refused_by == {"2": {"failed": 1}}
        ((found, clients),) = record.failed.items()
        assert told.startswith(found.removesuffix(" ..."))
        assert len(found) < 600
        assert clients == ("2",)
    assert bad.records[-1].cohort.resting == 0  # an error that a client owns up to is no strike


@dataclass(frozen=True)
class AtHome(Raising, FedPA):
    """The same, where clients evaluate their own networks."""

    norm: str = "local"


@pytest.mark.parametrize(
    ("method", "action"),
    [(Raising(norm="static", action="calibrate"), "calibrate"), (AtHome(action="calibrate"), "calibrate"),
     (AtHome(action="evaluate"), "evaluate")],
    ids=["static calibrate", "local calibrate", "local evaluate"],
)  # fmt: skip
def test_a_client_that_raises_when_it_measures_is_left_out_too(method, action):
    result = run(method, cnn_model(), image_data(SIZES), rounds=1, every=1)
    assert result.records[0].cohort.refused == {"failed": 1}
    assert result.records[0].cohort.merged == 4


def test_if_nobody_gets_through_the_run_stops_with_the_first_traceback():
    with pytest.raises(ClientsFailedError) as caught:
        run(Raising(who=(0, 1, 2, 3)), cnn_model(), image_data(SIZES))
    told = str(caught.value)
    assert told.startswith(
        "round 1: no client got through, in 4 tries; the first, client 0, raised\nTraceback"
    )
    assert told.endswith("KeyError: 'label'")
    assert "raise self.error" in told
    assert caught.value.exit_code == 70


@pytest.mark.parametrize("quorum", [0.0, 0.25])
def test_other_clients_are_asked_before_a_run_stops(quorum):
    """One client a round, and it raises: that is not yet the user's bug."""
    rules = EngineSettings(quorum=quorum)
    result = run(Raising(), cnn_model(), image_data(SIZES), rounds=6, cohort=1, rules=rules)
    assert all(record.cohort.merged == 1 for record in result.records)
    assert sum(record.cohort.abandoned for record in result.records) > 0


def test_nobody_who_can_calibrate_is_the_users_bug():
    with pytest.raises(ClientsFailedError, match="measuring norms .*\nTraceback"):
        run(
            Raising(norm="static", who=(0, 1, 2, 3), action="calibrate"),
            cnn_model(),
            image_data(SIZES),
            every=1,
        )


def on_labels(output, batch):
    """A loss of one's own: what it makes of labels is known to nobody before it is called."""
    return torch.nn.functional.cross_entropy(output, batch[1])


def test_a_label_out_of_range_does_not_end_a_run(tmp_path):
    data = vector_data((10,) * 4)
    x, y = data.train.columns
    y = y.clone()
    y[13] = 2**31
    data = replace(data, train=Examples.of(x, y))
    done = fedtailor.train(
        tiny_mlp(),
        data,
        "equal",
        "fedavg",
        task="own",
        loss=on_labels,
        rounds=2,
        folder=tmp_path / "run",
        progress=False,
    )
    assert [record.cohort.refused for record in done.history] == [{"failed": 1}] * 2
    rounds = [event for event in RunFolder(tmp_path / "run").events() if event["event"] == "round"]
    (error,) = rounds[0]["failed"]
    assert error.startswith("IndexError: Target 2147483648 is out of bounds")
    assert rounds[0]["failed"][error] == ["1"]
    assert [replace(each, seconds=0) for each in RunFolder(tmp_path / "run").records()] == [
        replace(each, seconds=0) for each in done.history
    ]


METHOD = """
from dataclasses import dataclass
from fedtailor.method import Method
from fedtailor.methods.apfl.fedpa import FedPA

@dataclass(frozen=True)
class Touchy(Method):
    who: tuple[int, ...] = (1,)

    def prepare(self, task, data, model):
        if task.client.id in self.who:
            raise KeyError("no such label")
        return task
"""
CONFIG = """
name = "touchy"
rounds = 3
clients_per_round = 5
evaluate_every = 3
[data]
clients = 5
limit = 100
[model]
name = "cnn"
channels = [4, 8]
[method]
name = "{file}:Touchy"
who = {who}
"""


@pytest.fixture
def touchy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(who: list[int]) -> str:
        file = f"touchy_{len(who)}.py"  # a module of its own for each test
        Path(file).write_text(METHOD, encoding="utf-8")
        Path("touchy.toml").write_text(CONFIG.format(who=who, file=file), encoding="utf-8")
        return "touchy.toml"

    return write


def test_the_command_goes_on_and_names_the_client_and_its_error(touchy, monkeypatch, capfd):
    assert call(monkeypatch, "run", touchy([1])) == 0
    told = capfd.readouterr().out
    assert "Refused updates: 3 x failed; of client 1 (3 x)" in told
    assert "Failed: client 1, KeyError: 'no such label'" in told
    assert call(monkeypatch, "resume", "runs/touchy", "--json") == 0
    assert json.loads(capfd.readouterr().out)["failed"] == {"KeyError: 'no such label'": ["1"]}


def test_the_command_stops_with_code_70_and_the_traceback_where_all_clients_raise(touchy, monkeypatch, capfd):
    assert call(monkeypatch, "run", touchy([0, 1, 2, 3, 4])) == 70
    told = capfd.readouterr().err
    assert "round 1: no client got through" in told
    assert "touchy_5.py" in told
    assert "KeyError: 'no such label'" in told
    assert not Path("runs/touchy").exists()  # a first round that breaks leaves nothing behind


def test_rounds_that_were_done_are_not_thrown_away(tmp_path):
    """Nothing of them is saved yet, but for their records: those stay, and the run can be taken up again."""

    def one_too_many(record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyError("a tracker of one's own")

    with pytest.raises(KeyError):
        fedtailor.train(
            tiny_mlp(), vector_data(), "equal", "fedavg", rounds=3, folder=tmp_path / "run", progress=False,
            checkpoint={"every": 10}, on_round=one_too_many, engine={"workers": 0},
        )  # fmt: skip
    assert [each.round for each in RunFolder(tmp_path / "run").records()] == [1, 2]
