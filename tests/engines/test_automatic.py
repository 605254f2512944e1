"""Which engine runs: workers where they pay, this process where they do not or cannot."""

from __future__ import annotations

import math

import pytest
import torch

from fedtailor.config import make_config, to_toml
from fedtailor.elasticity.front_door import elastic
from fedtailor.engines import automatic, opening
from fedtailor.engines.automatic import Automatic
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.opening import check_workers, open_engine
from fedtailor.engines.settings import EngineSettings, available_cores
from fedtailor.engines.workers.luggage import NotPortable
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.errors import FedtailorError
from fedtailor.methods.registry import get_method
from fedtailor.objective import Objective
from helpers import cnn_model, differing, image_data, run, timeless, tiny_mlp, vector_data

METHOD, MODEL, DATA = get_method("heterofl")(), cnn_model(), image_data()
SETTINGS = {"fleet": "uniform-2", "rounds": 2, "every": 1}


def opened(workers, model=MODEL, data=DATA, **more):
    return open_engine(METHOD, model, data, EngineSettings(workers=workers), **more)


def unportable():
    """A user's loss that exists in this process alone."""
    data = vector_data()
    objective = Objective(lambda output, batch: torch.nn.functional.cross_entropy(output, batch[-1]))
    return elastic(tiny_mlp(), data.example(), objective=objective), data


def test_what_the_settings_ask_for(monkeypatch):
    monkeypatch.setattr(opening, "available_cores", lambda: 2)
    with opened(0) as engine:
        assert isinstance(engine, InProcess)
    with opened("auto") as engine:
        assert isinstance(engine, Automatic)
    with opened(1) as engine:
        assert isinstance(engine, WorkerPool)
        assert engine.pids == []  # nothing is started before there is something to do
    monkeypatch.setattr(opening, "available_cores", lambda: 1)
    with opened("auto") as engine:
        assert isinstance(engine, InProcess)


def test_threads_of_clients_count(monkeypatch):
    """Two threads for each client leave room for half as many workers."""
    monkeypatch.setattr(opening, "available_cores", lambda: 3)
    monkeypatch.setattr(opening.torch, "get_num_threads", lambda: 2)
    with opened("auto") as engine:
        assert isinstance(engine, InProcess)


def test_a_short_run_starts_no_process(monkeypatch):
    monkeypatch.setattr(automatic, "WorkerPool", None)  # would fail
    with Automatic(METHOD, MODEL, DATA, 2, pytest.fail) as engine:
        run(METHOD, MODEL, DATA, engine=lambda _: engine, **SETTINGS)


@pytest.mark.slow
def test_workers_take_over_in_the_middle_and_nothing_changes(monkeypatch):
    monkeypatch.setattr(automatic, "HEAD_START_SECONDS", 0.0)
    here = run(METHOD, MODEL, DATA, **SETTINGS)
    with Automatic(METHOD, MODEL, DATA, 2, pytest.fail) as engine:
        while not engine._pool_is_ready():
            pass
        there = run(METHOD, MODEL, DATA, engine=lambda _: engine, **SETTINGS)
        assert engine._pool is not None
        pids = engine._pool.pids
        assert pids
        assert engine._alone == 0.0  # all of it was done by workers
    assert differing(here.state.weights, there.state.weights) == set()
    assert timeless(here.records) == timeless(there.records)


def test_what_cannot_travel_stays_here_and_is_said_once(monkeypatch):
    monkeypatch.setattr(automatic, "HEAD_START_SECONDS", 0.0)
    model, data = unportable()
    said: list[str] = []
    method = get_method("fedavg")()
    here = run(method, model, data, rounds=2)
    with Automatic(method, model, data, 2, said.append) as engine:
        there = run(method, model, data, rounds=2, engine=lambda _: engine)
    assert differing(here.state.weights, there.state.weights) == set()
    assert len(said) == 1
    assert said[0].startswith("all clients run in one process, on one core: objective cannot be sent")


class Failing:
    """A pool whose workers never come up, after one of them has answered."""

    def __init__(self, method, model, data, workers) -> None:
        self.inner = InProcess(method, model, data)
        self.ready, self.starting, self.closed = True, False, False

    def start(self) -> None:
        pass

    def run(self, tasks):
        yield None
        yield from self.inner.run(tasks[:1])
        raise NotPortable("3 worker processes in a row ended before they were ready")

    def close(self) -> None:
        self.closed = True


def test_workers_that_do_not_come_up_are_done_without(monkeypatch):
    monkeypatch.setattr(automatic, "HEAD_START_SECONDS", 0.0)
    monkeypatch.setattr(automatic, "WorkerPool", Failing)
    said: list[str] = []
    here = run(METHOD, MODEL, DATA, **SETTINGS)
    with Automatic(METHOD, MODEL, DATA, 2, said.append) as engine:
        there = run(METHOD, MODEL, DATA, engine=lambda _: engine, **SETTINGS)
    assert differing(here.state.weights, there.state.weights) == set()
    assert [record.cohort.refused for record in there.records] == [{}, {}]
    assert len(said) == 1


def test_a_number_of_workers_is_a_promise():
    model, data = unportable()
    with pytest.raises(NotPortable, match="objective cannot be sent to worker processes"):
        check_workers(METHOD, model, data, EngineSettings(workers=2))
    for workers in (0, "auto"):
        check_workers(METHOD, model, data, EngineSettings(workers=workers))


def test_cores_are_those_that_the_process_may_use():
    assert 1 <= available_cores() <= 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": -1}, "engine.workers = -1: expected auto, 0, or the number of processes"),
        ({"deadline": 0}, "engine.deadline = 0: expected seconds above 0"),
        ({"deadline": math.inf}, "engine.deadline = inf: expected seconds above 0"),
        ({"quorum": 1.5}, "engine.quorum = 1.5: expected a share from 0 to 1"),
        ({"over_selection": 0.9}, "engine.over_selection = 0.9: expected at least 1, such as 1.3"),
        ({"strikes": -1}, "engine.strikes = -1: expected at least 0"),
        ({"retries": -1}, "engine.retries = -1: expected at least 0"),
        ({"pause": -1}, "engine.pause = -1: expected at least 0 seconds"),
    ],
)
def test_settings_that_make_no_engine(settings, message):
    with pytest.raises(FedtailorError) as caught:
        EngineSettings(**settings)
    assert str(caught.value) == message


def test_the_config_has_a_section_for_it():
    config = make_config({"engine": {"workers": 3, "deadline": 60}}, ["engine.over_selection=1.3"])
    assert config.round_settings.engine == EngineSettings(workers=3, deadline=60.0, over_selection=1.3)
    assert 'workers = "auto"' in to_toml(make_config({}))
    assert make_config({}, ["engine.workers=auto"]).engine.workers == "auto"
    with pytest.raises(FedtailorError, match="unknown key in \\[engine\\] 'worker': did you mean 'workers'"):
        make_config({"engine": {"worker": 3}})
    with pytest.raises(FedtailorError, match="engine.workers"):
        make_config({"engine": {"workers": "many"}})
