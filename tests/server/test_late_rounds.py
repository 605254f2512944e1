"""Rounds that are evaluated while the next one trains: told in their order, the same to the bit, never lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedtailor.client.evaluate import evaluate_deployed
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import QuorumError
from fedtailor.messages import Metrics, Refused, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import evaluate_aside
from fedtailor.server.faults import Timely
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings, Setup
from fedtailor.server.stopping import Stopping
from fedtailor.storage.checkpoint import Checkpoint, encode_checkpoint
from helpers import cnn_model, image_data, mlp_model, setup_of, timeless, vector_data

MODEL, DATA = mlp_model(), vector_data()
METHOD = get_method("heterofl")()
SETTINGS = RoundSettings(5, 3, 2, engine=EngineSettings(retries=0))


@dataclass(frozen=True)
class Aside:
    """An engine that evaluates when it is asked for the scores; ``events`` is what happened, in order."""

    inner: InProcess
    events: list[str] = field(default_factory=list)
    failing: int = -1  # the round in which nobody answers

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused]:
        if tasks[0].round == self.failing:
            return
        yield from self.inner.run(tasks)
        self.events.append(f"trained {tasks[0].round + 1}")

    def measure(self, deployed: Any, action: str = "evaluate") -> list[dict[str, float]]:
        self.events.append("measured at once")
        return evaluate_deployed(self.inner.model, deployed, self.inner.data.test)

    def measure_aside(self, deployed: Any, action: str = "evaluate") -> Any:
        self.events.append("left aside")
        return lambda: evaluate_deployed(self.inner.model, deployed, self.inner.data.test)


Told = list[tuple[RoundRecord, bytes]]


def rounds(engine: Any, setup: Setup) -> Told:
    told: Told = []

    def on_end(record: RoundRecord, at: Checkpoint) -> None:
        told.append((record, b"".join(bytes(piece) for piece in encode_checkpoint(at))))
        if isinstance(engine, Aside):
            engine.events.append(f"told {record.round}")

    try:
        run_rounds(setup, engine, on_end)
    except QuorumError:
        told.append((RoundRecord(-1), b""))
    return told


def test_a_round_is_told_after_the_next_has_trained_and_the_last_at_once():
    engine = Aside(InProcess(METHOD, MODEL, DATA))
    rounds(engine, setup_of(METHOD, MODEL, DATA, "uniform-2", SETTINGS))
    assert engine.events == [
        "trained 1", "told 1",
        "trained 2", "left aside",
        "trained 3", "told 2", "told 3",
        "trained 4", "left aside",
        "trained 5", "told 4", "measured at once", "told 5",
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 2, 3])
def test_records_and_checkpoints_are_those_of_an_engine_that_evaluates_at_once(every):
    setup = setup_of(METHOD, MODEL, DATA, "uniform-2", replace(SETTINGS, evaluate_every=every))
    aside = rounds(Aside(InProcess(METHOD, MODEL, DATA)), setup)
    at_once = rounds(InProcess(METHOD, MODEL, DATA), setup)
    assert timeless(record for record, _ in aside) == timeless(record for record, _ in at_once)
    assert [saved for _, saved in aside] == [saved for _, saved in at_once]
    assert [record.best_round for record, _ in aside if record.tiers]  # of every evaluated round


def test_a_round_without_a_quorum_does_not_cost_the_one_before():
    engine = Aside(InProcess(METHOD, MODEL, DATA), failing=2)
    told = rounds(engine, setup_of(METHOD, MODEL, DATA, "uniform-2", SETTINGS))
    assert [record.round for record, _ in told] == [1, 2, -1]
    assert told[1][0].tiers is not None


class Clumsy(type(METHOD)):  # type: ignore[misc]
    """A method that cannot merge the third round."""

    def merge(self, state: ServerState, updates: Any, model: Any) -> ServerState:
        if state.round == 2:
            raise ZeroDivisionError
        return super().merge(state, updates, model)


def test_an_exception_after_training_does_not_cost_the_round_before():
    engine = Aside(InProcess(METHOD, MODEL, DATA))
    told: list[int] = []
    with pytest.raises(ZeroDivisionError):
        run_rounds(
            setup_of(Clumsy(), MODEL, DATA, "uniform-2", SETTINGS),
            engine,
            lambda record, _: told.append(record.round),
        )
    assert told == [1, 2]


@dataclass
class Impatient:
    """Someone who presses Ctrl-C while round 3 trains, when round 2 is being evaluated aside."""

    engine: Aside

    @property
    def asked_to_stop(self) -> bool:
        return "trained 3" in self.engine.events

    def stop_if_asked(self, at: Checkpoint) -> None:
        if self.asked_to_stop:
            raise KeyboardInterrupt(at.state.round)


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_asked_to_stop_keeps_the_round_that_it_is_in(every):
    engine = Aside(InProcess(METHOD, MODEL, DATA))
    setup = setup_of(METHOD, MODEL, DATA, "uniform-2", replace(SETTINGS, evaluate_every=every))
    told: list[int] = []
    with pytest.raises(KeyboardInterrupt, match="3"):
        run_rounds(setup, engine, lambda record, _: told.append(record.round), requests=Impatient(engine))
    assert told == [1, 2, 3]
    assert "trained 4" not in engine.events


class Looking(type(METHOD)):  # type: ignore[misc]
    """A method that looks at scores."""

    def observe(self, state: ServerState, evaluation: Mapping[str, Metrics]) -> ServerState:
        return state


def setups() -> dict[str, tuple[Method, Any, Any, RoundSettings]]:
    usual = RoundSettings(4, 3, 2)
    norms, pictures = cnn_model(), image_data()
    return {
        "nothing": (METHOD, MODEL, DATA, usual),
        "merged statistics": (replace(METHOD, norm="averaged"), norms, pictures, usual),
        "measured statistics": (replace(METHOD, norm="static"), norms, pictures, usual),
        "statistics of clients": (get_method("fedpa")(), norms, pictures, usual),
        "early stopping": (METHOD, MODEL, DATA, replace(usual, stopping=Stopping(patience=2))),
        "the best round": (METHOD, MODEL, DATA, replace(usual, stopping=Stopping(restore_best=True))),
        "validation": (METHOD, MODEL, DATA.with_validation(0.5, Seeds(0)), usual),
        "a method that looks": (Looking(), MODEL, DATA, usual),
    }


@pytest.mark.parametrize("what", setups())
def test_only_where_nothing_depends_on_it(what):
    method, model, data, settings = setups()[what]
    setup = setup_of(method, model, data, "uniform-2", settings)
    engine = Timely(Aside(InProcess(method, model, data)), 60.0)
    later = evaluate_aside(setup, setup.start, engine)
    assert (later is not None) == (what in ("nothing", "merged statistics"))
    assert evaluate_aside(setup, setup.start, Timely(InProcess(method, model, data), 60.0)) is None
