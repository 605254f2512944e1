"""Rounds that are told of while the next one's clients are at work: in their order, each once, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError, QuorumError
from fedtailor.messages import ServerState, Task
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.server.faults import Timely
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings, Setup
from fedtailor.storage.checkpoint import Checkpoint, encode_checkpoint
from helpers import mlp_model, setup_of, timeless, vector_data

MODEL, DATA = mlp_model(), vector_data()
METHOD = get_method("heterofl")()
SETTINGS = RoundSettings(5, 3, 4, engine=EngineSettings(retries=0))  # evaluated after rounds 4 and 5


@dataclass
class Handing:
    """An engine that gives out tasks, says so, and does them afterwards; ``events`` is what happened, in order."""

    hands_out: bool = True
    failing: int = -1  # the round in which nobody answers
    events: list[str] = field(default_factory=list)
    inner: InProcess = field(default_factory=lambda: InProcess(METHOD, MODEL, DATA))

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        round = tasks[0].round + 1
        self.events.append(f"given {round}")
        yield None
        if round != self.failing:
            yield from self.inner.run(tasks)
        self.events.append(f"trained {round}")


def setup(settings: RoundSettings = SETTINGS) -> Setup:
    return setup_of(METHOD, MODEL, DATA, "uniform-2", settings)


def told_by(engine: Any, of: Setup) -> list[tuple[RoundRecord, bytes]]:
    told: list[tuple[RoundRecord, bytes]] = []

    def on_end(record: RoundRecord, at: Checkpoint) -> None:
        told.append((record, b"".join(bytes(piece) for piece in encode_checkpoint(at))))
        if isinstance(engine, Handing):
            engine.events.append(f"told {record.round}")

    run_rounds(of, engine, on_end)
    return told


def test_a_round_is_told_of_when_the_next_one_has_been_given_out_and_an_evaluated_one_at_once() -> None:
    engine = Handing()
    told_by(engine, setup())
    assert engine.events == [
        "given 1", "trained 1",
        "given 2", "told 1", "trained 2",
        "given 3", "told 2", "trained 3",
        "given 4", "told 3", "trained 4", "told 4",
        "given 5", "trained 5", "told 5",
    ]  # fmt: skip


def test_who_works_here_tells_first() -> None:
    engine = Handing(hands_out=False)
    told_by(engine, setup())
    assert engine.events[:5] == ["given 1", "trained 1", "told 1", "given 2", "trained 2"]


def test_records_and_checkpoints_are_the_same() -> None:
    later, at_once = told_by(Handing(), setup()), told_by(InProcess(METHOD, MODEL, DATA), setup())
    assert timeless(record for record, _ in later) == timeless(record for record, _ in at_once)
    assert [saved for _, saved in later] == [saved for _, saved in at_once]


def test_a_round_without_a_quorum_does_not_cost_the_one_before() -> None:
    engine = Handing(failing=3)
    with pytest.raises(QuorumError):
        told_by(engine, setup())
    assert [event for event in engine.events if event.startswith("told")] == ["told 1", "told 2"]


class Clumsy(type(METHOD)):  # type: ignore[misc]
    """A method that cannot begin the third round."""

    def begin(self, state: ServerState, model: Any) -> ServerState:
        if state.round == 2:
            raise ZeroDivisionError
        return super().begin(state, model)


def test_whatever_ends_the_next_round_before_it_begins_does_not_cost_the_one_before() -> None:
    engine, told = Handing(), list[int]()
    with pytest.raises(ZeroDivisionError):
        run_rounds(
            setup_of(Clumsy(), MODEL, DATA, "uniform-2", SETTINGS),
            engine,
            lambda record, _: told.append(record.round),
        )
    assert told == [1, 2]


def test_who_raises_when_told_ends_the_run_and_is_not_told_again() -> None:
    engine, told = Handing(), list[int]()

    def full(record: RoundRecord, _: Checkpoint) -> None:
        told.append(record.round)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        run_rounds(setup(), engine, full)
    assert told == [1]
    assert engine.events == ["given 1", "trained 1", "given 2"]


@dataclass
class Impatient:
    """Someone who presses Ctrl-C while round 2 trains."""

    engine: Handing

    @property
    def asked_to_stop(self) -> bool:
        return "trained 2" in self.engine.events

    def stop_if_asked(self, at: Checkpoint) -> None:
        if self.asked_to_stop:
            raise KeyboardInterrupt(at.state.round)


def test_a_run_that_is_asked_to_stop_does_not_begin_another_round() -> None:
    engine, told = Handing(), list[int]()
    with pytest.raises(KeyboardInterrupt, match="2"):
        run_rounds(setup(), engine, lambda record, _: told.append(record.round), requests=Impatient(engine))
    assert told == [1, 2]
    assert "given 3" not in engine.events


def test_signed_logs_are_told_at_once() -> None:
    """Their records hold what the next round changes."""
    assert setup().tells_later
    assert not replace(setup(), audited=True).tells_later


class Broken(Handing):
    """An engine that finds out that its workers are gone when it is asked about them."""

    def __init__(self) -> None:
        self.events, self.inner, self.failing = [], InProcess(METHOD, MODEL, DATA), -1

    @property
    def hands_out(self) -> bool:  # type: ignore[override]
        raise FedtailorError("no worker could be started")


def test_an_engine_that_breaks_between_rounds_does_not_cost_the_one_before() -> None:
    engine = Broken()
    with pytest.raises(FedtailorError, match="no worker"):
        told_by(engine, setup())
    assert engine.events == ["given 1", "trained 1", "told 1"]


def test_the_time_to_tell_is_no_clients_time() -> None:
    now = [0.0]

    def slow(_record: RoundRecord, _at: Checkpoint) -> None:
        now[0] += 10.0

    end = run_rounds(setup(), Timely(Handing(), 1.0, lambda: now[0]), slow)
    assert end.state.round == SETTINGS.rounds


class Own(type(METHOD)):  # type: ignore[misc]
    """A method of the user's own."""


def test_methods_of_users_may_change_their_state_when_a_round_begins() -> None:
    assert not setup_of(Own(), MODEL, DATA, "uniform-2", SETTINGS).tells_later
