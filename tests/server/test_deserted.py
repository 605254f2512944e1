"""Rounds that begin when every client has left: nothing is learnt from nobody, and whoever comes back is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import QuorumError
from fedtailor.fleet.roster import Profile, Roster
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings
from helpers import mlp_model, setup_of, vector_data


def rounds(
    look: Callable[[Roster], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[RoundRecord], list[float]]:
    """Two rounds with two clients who have joined; ``look`` changes who is there whenever somebody looks."""
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data((4, 4))
    settings = RoundSettings(
        rounds=2, clients_per_round=2, evaluate_every=2, engine=EngineSettings(retries=2)
    )
    roster = Roster()
    for name in ("a", "b"):
        roster.join(Profile(name, 4))
    roster.look = lambda: look(roster)
    setup = replace(setup_of(method, model, data, settings=settings), roster=roster)
    records: list[RoundRecord] = []
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    run_rounds(setup, InProcess(method, model, data), lambda record, _: records.append(record))
    return records, slept


def test_nobody_is_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuorumError, match="round 1 has nobody to ask: of 3 tries the last found no client"):
        rounds(lambda roster: roster.present.clear(), monkeypatch)


def test_whoever_comes_back_is_asked_in_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two looks find nobody: a network that was lost for a minute costs no round."""
    looks: list[int] = []

    def look(roster: Roster) -> None:
        looks.append(len(looks))
        roster.present = {0, 1} if len(looks) > 2 else set()

    records, slept = rounds(look, monkeypatch)
    assert [(record.cohort.merged, record.cohort.abandoned) for record in records] == [(2, 2), (2, 0)]
    assert slept == [30.0, 60.0]
