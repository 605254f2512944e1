"""Clients that fall out under masks, servers that ask twice, lost secrets: the sum is right, or there is none."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")
pytest.importorskip("cryptography", reason="the extra fedtailor[secure] is not installed")

from flwr.app import Message

from fedtailor.config import make_config
from fedtailor.engines.flower import engine as flower_engine
from fedtailor.engines.flower.masked import MaskedEngine
from fedtailor.engines.flower.post import Parcel, content_of, parcel_of
from fedtailor.flower import server
from fedtailor.flower.server import serve
from flower.loopback import LoopbackGrid, Spoil
from flower.masked.runs import BAD, CONFIG, LOST, SHORT, Watched, events, here, nodes, row, there
from helpers import differing, final_weights, slow_if

STEPS = ("advertise", "share", "mask", "unmask")


def step_of(reply: Message) -> str:
    """Which step of a round a node answers."""
    head = parcel_of(reply.content).head
    told = next(iter(head.get("told", {}).values()), {})
    known = {"keys": "advertise", "shares": "share", "opening": "unmask"}
    return "mask" if "answers" in head else next((known[key] for key in known if key in told), "")


def broken(step: str) -> Spoil:
    """A node that fails in one step."""

    def spoil(reply: Message) -> Message:
        if step_of(reply) == step:
            reply.content = content_of(Parcel({"error": "no room"}))
        return reply

    return spoil


@pytest.mark.parametrize("step", [slow_if(each, "advertise", "mask") for each in STEPS])
def test_who_drops_out_is_missing_from_the_sum_and_nothing_else(step: str, tmp_path: Path) -> None:
    """A third of the clients is lost in a step; before its update has come, or after it."""
    grid = LoopbackGrid(SHORT, nodes(tmp_path), {BAD: broken(step)})
    weights = there(SHORT, tmp_path, grid)
    _, expected = here(SHORT, () if step == "unmask" else LOST)
    assert not differing(expected, weights)
    assert [(each["client"], each["step"], each["reason"]) for each in events(tmp_path)] == [
        (str(client), step, "no room") for client in LOST
    ]
    assert row(tmp_path)["merged"] == (6 if step == "unmask" else 4)


@pytest.mark.parametrize("step", [slow_if(each, "mask") for each in STEPS[2:]])
def test_a_round_that_more_than_a_third_has_left_moves_nothing(step: str, tmp_path: Path) -> None:
    grid = LoopbackGrid(SHORT, nodes(tmp_path), {node: broken(step) for node in (0, 1)})
    weights = there(SHORT, tmp_path, grid)
    before, _ = here(SHORT)
    assert not differing(before, weights)
    assert row(tmp_path)["privacy"]["rested"] == {"0.5+1": 6, "1": 3}
    if step == "unmask":
        assert "2 of 6 clients were there at the end, and 4 are needed" in events(tmp_path)[-1]["reason"]


class Twice(LoopbackGrid):
    """A SuperLink that delivers every message twice; the second answers are ``again``."""

    def delivered(self, message: Message, node: int) -> Message:
        reply = super().delivered(message, node)
        self.again = [*getattr(self, "again", []), parcel_of(super().delivered(message, node).content)]
        return reply


def test_no_step_is_taken_twice(tmp_path: Path) -> None:
    """Two updates under one mask would tell their difference; the round itself goes on."""
    grid = Twice(SHORT, nodes(tmp_path))
    weights = there(SHORT, tmp_path, grid)
    assert not differing(here(SHORT)[1], weights)
    said = []
    for parcel in grid.again:
        assert not parcel.pieces
        if "told" in parcel.head:
            said += [told["error"] for told in parcel.head["told"].values()]
        elif "answers" in parcel.head:
            said += [answer["refused"][3] for answer in parcel.head["answers"]]
    found = {sentence: said.count(sentence) for sentence in said}
    assert sorted(found.values()) == [6, 6, 6, 6]
    for word in ("twice for keys", "twice for shares", "twice for an update", "has no secrets of this round"):
        assert any(word in sentence for sentence in found), word


def test_messages_of_a_round_that_is_over_tell_nothing(tmp_path: Path) -> None:
    """Replayed in their order, they make new keys, and those are not the ones that the others were sent."""
    grid = Watched(SHORT, nodes(tmp_path))
    there(SHORT, tmp_path, grid)
    before, grid.heard = grid.heard, []
    for message in [each for each in grid.sent if each.metadata.dst_node_id == BAD]:
        grid.delivered(message, BAD)
    old, new = ([parcel.head["told"] for node, parcel in heard if node == BAD and "told" in parcel.head]
                for heard in (before, grid.heard))  # fmt: skip
    assert set(old[0]["0"]["keys"]).isdisjoint(new[0]["0"]["keys"])
    assert "the list of keys is not that of this round" in new[1]["0"]["error"]
    (tasks,) = (parcel for _, parcel in grid.heard if "answers" in parcel.head)
    assert tasks.head["answers"][0]["refused"][2] == "no-answer"
    assert not tasks.pieces
    assert "error" in new[2]["0"]


class Forgetful(LoopbackGrid):
    """Before a client trains, its disk is lost."""

    def delivered(self, message: Message, node: int) -> Message:
        if node == BAD and parcel_of(message.content).head["ask"] == "tasks":
            shutil.rmtree(self.nodes[node]["state"])
        return super().delivered(message, node)


def test_a_client_that_has_lost_its_secrets_counts_as_dropped(tmp_path: Path) -> None:
    weights = there(SHORT, tmp_path, Forgetful(SHORT, nodes(tmp_path)))
    assert not differing(here(SHORT, LOST)[1], weights)
    reasons = {(each["client"], each["step"], each["reason"]) for each in events(tmp_path)}
    lost = "secure: the client has no secrets of this round (any more); it takes no part"
    assert reasons == {("0", "mask", lost), ("3", "mask", lost)}
    assert row(tmp_path)["refused_by"] == {"0": {"no-answer": 1}, "3": {"no-answer": 1}}


class Greedy(LoopbackGrid):
    """A server that asks two clients for their updates in clear."""

    def delivered(self, message: Message, node: int) -> Message:
        parcel = parcel_of(message.content)
        if node == BAD and parcel.head["ask"] == "tasks":
            for task in parcel.head["tasks"]:
                del task["masked"]
            message.content = content_of(parcel)
        return super().delivered(message, node)


def test_an_update_is_never_sent_in_clear(tmp_path: Path) -> None:
    there(SHORT, tmp_path, Greedy(SHORT, nodes(tmp_path)))
    assert [each["client"] for each in events(tmp_path)] == ["0", "3"]
    for event in events(tmp_path):
        assert event["reason"].startswith("secure: the server asks for train in clear")


def test_words_of_another_form_are_refused_as_any_bad_update(tmp_path: Path) -> None:
    def spoil(reply: Message) -> Message:
        parcel = parcel_of(reply.content)
        if "answers" in parcel.head:
            shorter, renamed = parcel.head["answers"]
            renamed["classes"] = ["1"]
            pieces = {**parcel.pieces, shorter["piece"]: parcel.pieces[shorter["piece"]][:-4]}
            reply.content = content_of(Parcel(parcel.head, pieces))
        return reply

    weights = there(SHORT, tmp_path, LoopbackGrid(SHORT, nodes(tmp_path), {BAD: spoil}))
    assert not differing(here(SHORT, LOST)[1], weights)
    assert row(tmp_path)["refused_by"] == {"0": {"unreadable": 1}, "3": {"unreadable": 1}}


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("step", [slow_if(each, "unmask") for each in ("advertise", "unmask")])
def test_a_silent_client_is_waited_for_a_sixth_of_the_deadline(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(flower_engine, "time", clock)
    monkeypatch.setattr(server, "MaskedEngine", partial(MaskedEngine, clock=clock.monotonic))
    text = SHORT.replace("wait = 5", "wait = 5\ndeadline = 600")
    silent: Spoil = lambda reply: None if step_of(reply) == step else reply  # noqa: E731
    weights = there(text, tmp_path, LoopbackGrid(text, nodes(tmp_path), {BAD: silent}))
    assert 100 < clock.now < 110
    assert not differing(here(text, () if step == "unmask" else LOST)[1], weights)
    assert [each["reason"] for each in events(tmp_path)] == ["not connected, or no answer in time"] * 2


class Dying(Watched):
    """A server that is gone when it has all updates of its second round."""

    alive = True

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ends = sum(parcel_of(each.content).head.get("step") == "unmask" for each in self.sent)
        if self.alive and ends == 3 and parcel_of(messages[0].content).head.get("step") == "unmask":
            self.alive = False
            raise ConnectionError
        return super().push_messages(messages)


@pytest.mark.slow
def test_a_resumed_round_has_new_keys_and_the_same_sums(tmp_path: Path) -> None:
    grid, config = Dying(CONFIG, nodes(tmp_path)), make_config(tomllib.loads(CONFIG))
    with pytest.raises(ConnectionError):
        serve(grid, config, tmp_path / "there")
    assert len(list(tmp_path.glob("state*/**/secrets-*"))) == 6
    serve(grid, config, tmp_path / "there")
    assert not differing(here(CONFIG)[1], final_weights(tmp_path / "there"))
    told = [
        each for _, parcel in grid.heard for each in parcel.head.get("told", {}).values() if "keys" in each
    ]
    keys = [key for each in told for key in each["keys"]]
    assert len(keys) == len(set(keys)) == 3 * 6 * 2  # rounds, clients, keys of each
    assert not list(tmp_path.glob("state*/**/secrets-*"))
