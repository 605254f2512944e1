"""Nodes that misbehave: the round goes on, and the model is that of the round without them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from flwr.app import Message

from fedtailor.config import make_config
from fedtailor.engines.flower.frames import digest_of
from fedtailor.engines.flower.post import Parcel, Post, content_of, parcel_of
from fedtailor.errors import FedtailorError
from fedtailor.flower.server import serve
from fedtailor.run.result import Run
from fedtailor.storage.wire import decode, encode
from flower.loopback import LoopbackGrid, Spoil
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights

TEXT = CONFIG.replace("{method}", "fedavg").replace("clients_per_round = 3", "clients_per_round = 4")
TEXT = TEXT.replace("clients = 5", "clients = 4").replace("workers = 0", "workers = 0\nwait = 5")
SHORT = TEXT.replace("rounds = 3", "rounds = 2").replace("evaluate_every = 1", "evaluate_every = 2")
BAD = 13  # the node that misbehaves: it answers for client 3


def nodes(tmp_path: Path, count: int = 4) -> dict[int, dict[str, Any]]:
    return {
        10 + n: {"partition-id": n, "num-partitions": 4, "state": str(tmp_path / f"state{n}")}
        for n in range(count)
    }


def run(tmp_path: Path, name: str, spoil: Spoil | None = None, text: str = TEXT, **there: Any) -> Run:
    grid = LoopbackGrid(text, there.get("nodes") or nodes(tmp_path), {BAD: spoil} if spoil else {})
    return serve(grid, make_config(tomllib.loads(text)), tmp_path / name)


def spoiled(reply: Message, change: Any) -> Message:
    """The answer with its first update changed; introductions are left alone."""
    parcel = parcel_of(reply.content)
    if "answers" not in parcel.head:
        return reply
    head, pieces = change(json.loads(json.dumps(parcel.head)), dict(parcel.pieces))
    reply.content = content_of(Parcel(head, pieces))
    return reply


def with_values(change: Any) -> Spoil:
    """A node whose tensors are changed before they are sent, in a frame that is right in itself."""

    def spoil(head: Any, pieces: dict[str, bytes]) -> Any:
        answer = head["answers"][0]
        value = decode(pieces[answer["piece"]])
        value["values"] = change(value["values"])
        frame = b"".join(bytes(chunk) for chunk in encode(value))
        answer["piece"] = digest_of(frame)
        return head, {answer["piece"]: frame}

    return lambda reply: spoiled(reply, spoil)


def nan(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value * float("nan") if value.is_floating_point() else value for name, value in values.items()
    }


def longer(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([value, value]) if value.dim() else value for name, value in values.items()}


def weightless(head: Any, pieces: Any) -> Any:
    head["answers"][0]["weight"] = float("nan")
    return head, pieces


def stranger(head: Any, pieces: Any) -> Any:
    head["answers"][0]["update"][0] = 0
    return head, pieces


def slander(head: Any, pieces: Any) -> Any:
    """Refuses in the name of another client, who would be struck for it."""
    return {**head, "answers": [{"refused": [0, 0, "non-finite", ""]}]}, {}


def nonsense(head: Any, pieces: Any) -> Any:
    return {"answers": [7, {"update": "x"}], "clients": "all"}, {}


class Replaying:
    """A node that sends its first answer again and again."""

    def __init__(self) -> None:
        self.first: Parcel | None = None

    def __call__(self, reply: Message) -> Message:
        parcel = parcel_of(reply.content)
        if "answers" in parcel.head:
            self.first = self.first or parcel
            reply.content = content_of(self.first)
        return reply


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What three honest clients make of it, when the fourth says that it cannot."""
    tmp_path = tmp_path_factory.mktemp("without")
    run(tmp_path, "run", lambda reply: spoiled(reply, lambda head, pieces: ({"error": "no room"}, {})), SHORT)
    return final_weights(tmp_path / "run")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_values(nan), "non-finite"),
        pytest.param(with_values(longer), "unreadable", marks=pytest.mark.slow),
        pytest.param(lambda reply: spoiled(reply, weightless), "bad-weight", marks=pytest.mark.slow),
        pytest.param(lambda reply: spoiled(reply, stranger), "no-answer", marks=pytest.mark.slow),
        (lambda reply: spoiled(reply, slander), "no-answer"),
        pytest.param(lambda reply: spoiled(reply, nonsense), "no-answer", marks=pytest.mark.slow),
    ],
    ids=["NaN", "wrong shape", "weight", "another client", "slander", "nonsense"],
)
def test_what_a_bad_node_sends_leaves_no_trace(
    spoil: Spoil, reason: str, without: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    finished = run(tmp_path, "run", spoil, SHORT)
    assert finished.state.round == 2
    assert reason in finished.history[0].cohort.refused_by["3"]
    assert set(finished.history[0].cohort.refused_by) == {"3"}
    assert not differing(without, final_weights(tmp_path / "run"))


def test_an_old_answer_is_not_taken_twice(tmp_path: Path) -> None:
    finished = run(tmp_path, "run", Replaying(), SHORT)
    assert "3" not in finished.history[0].cohort.refused_by
    assert finished.history[1].cohort.refused_by["3"] == {"wrong-round": 1}


class Stuttering(LoopbackGrid):
    """A grid whose SuperLink hands out every answer twice, and one that nobody asked for."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.reply("5"), self.reply("5"), self.reply("6")]

    def reply(self, number: str) -> Message:
        message = Message(content_of(Parcel({"of": number})), 1, "query")
        message.metadata.__dict__["_reply_to_message_id"] = number
        return message


def test_an_answer_counts_once() -> None:
    """A second one would find nobody who waits for it, and end the run."""
    assert list(Post(Stuttering("", {}), 1.0).received({"5"})) == [("5", Parcel({"of": "5"}))]


def test_nobody_answers_for_a_client_of_another_node(tmp_path: Path) -> None:
    """The fourth node says that it is the first one: it is not taken in, and the first keeps its client."""
    text = TEXT.replace("clients_per_round = 4", "clients_per_round = 3").replace("rounds = 3", "rounds = 1")
    text = text.replace("wait = 5", "wait = 0.2")
    there = nodes(tmp_path)
    there[13] = {**there[10], "state": str(tmp_path / "thief")}
    grid = LoopbackGrid(text, there)
    finished = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run")
    asked = [
        message.metadata.dst_node_id
        for message in grid.sent
        if parcel_of(message.content).head["ask"] == "tasks"
    ]
    assert sorted(set(asked)) == [10, 11, 12]
    assert not finished.history[0].cohort.refused


@pytest.mark.slow
def test_clients_come_and_go(tmp_path: Path) -> None:
    """Three nodes at the start, of which one leaves after the first round; the fourth comes late."""
    text = TEXT.replace("clients_per_round = 4", "clients_per_round = 3").replace("rounds = 3", "rounds = 4")
    there = nodes(tmp_path, 3)
    grid = LoopbackGrid(text, there)
    asked: list[list[int]] = []

    def follow(record: Any) -> None:
        asked.append(sorted(grid.nodes))
        if record.round == 1:
            del there[12]
            there.update({13: nodes(tmp_path)[13]})

    finished = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run", follow)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = [(event["event"], event.get("client")) for event in events if event["event"] in ("joined", "left")]
    assert ("left", "2") in told
    assert ("joined", "3") in told
    assert finished.state.round == 4
    assert not finished.history[-1].cohort.refused


def test_nobody_comes(tmp_path: Path) -> None:
    text = TEXT.replace("wait = 5", "wait = 0.2")
    with pytest.raises(
        FedtailorError, match=r"1 of 4 clients have joined after 0.2 s \(0\), 1 nodes are connected"
    ):
        run(tmp_path, "run", text=text, nodes=nodes(tmp_path, 1))
    assert not (tmp_path / "run").exists()


def test_who_is_connected_but_silent_is_told_apart(tmp_path: Path) -> None:
    """A machine under load takes long to begin: more SuperNodes would not help, more patience would."""
    text = TEXT.replace("wait = 5", "wait = 0.2")
    expected = (
        "0 of 4 clients have joined after 0.2 s, 1 nodes are connected to the SuperLink, of which 1 have not "
        "said yet who they are: .* raise engine.wait"
    )
    with pytest.raises(FedtailorError, match=expected):
        run(tmp_path, "run", lambda _: None, text=text, nodes={BAD: nodes(tmp_path)[BAD]})


def test_a_node_that_says_what_cannot_be_is_refused(tmp_path: Path) -> None:
    there = nodes(tmp_path)
    text = TEXT.replace("wait = 5", "wait = 0.2")
    for said, expected in [
        ({"tier": "huge"}, "unknown tier 'huge'"),
        ({"macs": "2"}, "node 13: .*macs"),  # no piece is so small
    ]:
        with pytest.raises(FedtailorError, match=f"3 of 4 clients have joined.*{expected}"):
            run(tmp_path, "run", text=text, nodes={**there, 13: {**there[13], **said}})
    there[13] = {"partition": 3}
    with pytest.raises(
        FedtailorError, match="3 of 4 clients have joined.*unknown key in --node-config 'partition'"
    ):
        run(tmp_path, "run", text=text, nodes=there)


@pytest.mark.slow
def test_a_client_that_lost_its_memory_says_so_and_starts_afresh(tmp_path: Path) -> None:
    text = TEXT.replace('name = "fedavg"', 'name = "flado"')
    grid = LoopbackGrid(text, nodes(tmp_path))

    def lose(record: Any) -> None:
        if record.round == 2:
            for file in (tmp_path / "state1").rglob("*.kept"):
                file.unlink()

    finished = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run", lose)
    assert finished.history[2].reported["1"]["memory lost"] == 1.0
    assert "memory lost" not in finished.history[2].reported["0"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    text = TEXT.replace('name = "fedavg"', 'name = "flado"')
    run(tmp_path, "whole", text=text)

    def die(record: Any) -> None:
        if record.round == 2:
            raise RuntimeError("killed")

    grid = LoopbackGrid(text, nodes(tmp_path))
    with pytest.raises(RuntimeError, match="killed"):
        serve(grid, make_config(tomllib.loads(text)), tmp_path / "run", die)
    serve(LoopbackGrid(text, nodes(tmp_path)), make_config(tomllib.loads(text)), tmp_path / "run")
    assert not differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "run"))


def test_pieces_are_of_the_size_of_the_cut_and_shared(tmp_path: Path) -> None:
    text = TEXT.replace('name = "cnn"\nchannels = [4, 6]', 'name = "mlp"\nhidden = [900, 300]')
    text = text.replace("rounds = 3", "rounds = 1").replace('"fedavg"', '"heterofl"')
    grid = LoopbackGrid(text, nodes(tmp_path))
    finished = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run")
    sent = [parcel_of(message.content) for message in grid.sent]
    tasks = [parcel for parcel in sent if parcel.head["ask"] == "tasks"]
    assert len(tasks) == 4
    assert len({name for parcel in tasks for name in parcel.pieces}) == 2  # two tiers, two pieces
    wire = sum(len(json.dumps(p.head)) + sum(map(len, p.pieces.values())) for p in tasks)
    cuts = finished.history[0].training.bytes_down
    assert cuts > 2e6
    assert cuts < wire < 1.05 * cuts
