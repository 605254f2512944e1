"""Who is taken in and who is not, without a network: nodes that change their minds, and nodes that say odd things."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.engines.flower import engine as engine_file
from fedtailor.engines.flower.choice import Choice
from fedtailor.engines.flower.engine import FlowerEngine
from fedtailor.engines.flower.frames import digest_of
from fedtailor.engines.flower.memory import Cupboard, get_maps, put_maps
from fedtailor.engines.flower.post import HEAD, TEXT, Failed, Parcel, Post, parcel_of
from fedtailor.errors import FedtailorError
from fedtailor.fleet.roster import Profile, Roster
from fedtailor.storage.wire import DecodeError
from helpers import mlp_model, vector_data


class Told(Post):
    """A grid whose nodes say at once what they are told to say; or nothing."""

    def __init__(self) -> None:
        super().__init__(None, 1.0)
        self.says: dict[int, Parcel | Failed] = {}
        self.asked: list[int] = []

    def nodes(self) -> set[int]:
        return set(self.says)

    def send(self, parcels: Mapping[int, Parcel], kind: str, group: str) -> dict[str, int]:
        self.asked += parcels
        return {str(node): node for node in parcels}

    def received(self, numbers: Collection[str]) -> Iterator[tuple[str, Parcel | Failed]]:
        yield from ((number, self.says[int(number)]) for number in list(numbers))


class Meeting:
    """An engine and what it notes; devices below 10 MACs are refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.post, self.roster, self.events = Told(), Roster(), list[tuple[str, Any]]()
        self.now = 0.0
        self.engine = FlowerEngine(
            self.post, self.roster, mlp_model(), {}, vector_data().test, lambda _client, _patches: True,
            self.check, lambda event, fields: self.events.append((event, fields.get("client"))),
        )  # fmt: skip
        monkeypatch.setattr(engine_file.time, "monotonic", lambda: self.now)  # type: ignore[attr-defined]

    def check(self, profile: Profile) -> None:
        if profile.budget is not None and (profile.budget.macs or 0) < 10:
            raise FedtailorError("macs = 2: no piece is so small")

    def hears(self, node: int, *clients: dict[str, Any], parts: Any = None) -> None:
        """A node introduces itself, or says so in an answer later."""
        said = [{"examples": 5, **client} for client in clients]
        self.post.says[node] = Parcel({"clients": said, "parts": parts})
        self.now += engine_file.AGAIN + 1
        if node in self.engine.homes.values():
            self.engine._introduce(node, self.post.says[node].head)  # type: ignore[union-attr]
        self.engine.look()

    @property
    def present(self) -> list[str]:
        return sorted(map(self.roster.name, self.roster.present))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    return Meeting(monkeypatch)


def test_a_device_under_another_name_counts_once(meeting: Meeting) -> None:
    meeting.hears(1, {"name": "old"})
    meeting.hears(1, {"name": "new"})
    assert meeting.present == ["new"]
    assert meeting.events == [("joined", "old"), ("joined", "new"), ("left", "old")]


def test_a_device_that_was_mended_is_taken_in(meeting: Meeting) -> None:
    meeting.hears(1, {"name": "phone", "limits": {"macs": "2"}})
    meeting.engine.look()
    assert (meeting.present, meeting.post.asked) == ([], [1])  # not at every look
    assert "no piece is so small" in meeting.engine.refused[1]
    meeting.hears(1, {"name": "phone", "limits": {"macs": "50"}})
    assert (meeting.present, meeting.engine.refused) == (["phone"], {})


def test_a_device_that_nothing_fits_any_more_is_let_go(meeting: Meeting) -> None:
    meeting.hears(1, {"name": "phone", "limits": {"macs": "50"}}, {"name": "watch"})
    meeting.hears(1, {"name": "phone", "limits": {"macs": "2"}}, {"name": "watch"})
    assert meeting.present == ["watch"]
    meeting.hears(1, {"name": "phone", "limits": {"macs": "60"}}, {"name": "watch"})
    assert meeting.roster.profiles[0].budget == Budget(macs="60")
    assert meeting.present == ["phone", "watch"]


def test_a_node_that_is_refused_decides_nothing(meeting: Meeting) -> None:
    meeting.hears(1, {"name": "0", "limits": {"macs": "2"}}, parts=4)
    meeting.hears(2, {"name": "phone"})
    assert (meeting.present, meeting.roster.split) == (["phone"], None)


@pytest.mark.parametrize("parts", [2**70, 10**12, 0, -1, True, "4", [4]])
def test_parts_that_cannot_be_are_refused(parts: Any, meeting: Meeting) -> None:
    meeting.hears(1, {"name": "0"}, parts=parts)
    assert (meeting.present, meeting.roster.split) == ([], None)
    assert meeting.engine.refused[1].startswith("parts = ")


def test_what_a_node_says_is_one_line(meeting: Meeting) -> None:
    meeting.post.says[1] = Failed("no room\nfinished: runs/x after 3 rounds\x1b[31m")
    meeting.engine.look()
    assert meeting.engine.refused[1] == "no room finished: runs/x after 3 rounds [31m"


def test_who_has_not_come_back_has_a_name() -> None:
    assert Roster({"phone-17": 0}).name(0) == "phone-17"


@pytest.mark.parametrize("nested", ["[" * 100_000, "[" * 40 + "]" * 40], ids=["unreadable", "readable"])
def test_a_deep_head_is_no_message(nested: str) -> None:
    text = b'{"clients": %s}' % nested.encode()
    with pytest.raises(DecodeError, match="head of a message"):
        parcel_of(SimpleNamespace(config_records={HEAD: {TEXT: text}}, array_records={}))


@pytest.mark.parametrize(
    "accuracy", [10**400, 1e300, -1e300, True, "1", None, [1]], ids=lambda each: f"{each!r:.8}"
)
def test_scores_that_nobody_can_have_are_refused(accuracy: Any) -> None:
    choice, model = Choice([[]], {0: 5, 1: 5}, {1: {0: [0]}, 2: {1: [0]}}), mlp_model()
    said = json.loads(json.dumps([{"loss": 1, "accuracy": accuracy}]))
    refused = choice.take(1, Parcel({"scores": {"0": said}}), model)
    assert "expected numbers for accuracy, loss" in refused[0]
    assert choice.take(2, Parcel({"scores": {"1": [{"loss": 1, "accuracy": 0.5}]}}), model) == {}
    assert choice.scores(model) == [{"loss": 1.0, "accuracy": 0.5}]


# On a device


def kept(cupboard: Cupboard, *versions: tuple[int, str]) -> list[bool]:
    return [cupboard.get(version) is not None for version in versions]


def test_the_memory_that_the_server_asked_for_stays(tmp_path: Path) -> None:
    """Not sampled, or late, for three rounds: every task names the memory that the server took last."""
    cupboard, memory = Cupboard(tmp_path), {"p": torch.ones(2)}
    cupboard.put((2, "train"), memory, keep=3)
    for round in (3, 4, 5, 6):
        cupboard.put((round, "calibrate"), memory, keep=3, asked=(2, "train"))
    assert kept(cupboard, (2, "train"), (3, "calibrate"), (6, "calibrate")) == [True, False, True]
    for round in (7, 8, 9, 10):
        cupboard.put((round, "train"), memory, keep=3, asked=(2, "train"))
    assert kept(cupboard, (2, "train"), (7, "train"), (10, "train")) == [True, False, True]


def test_the_memory_of_a_round_that_is_done_again_is_kept(tmp_path: Path) -> None:
    cupboard, memory = Cupboard(tmp_path), {"p": torch.ones(2)}
    for round in (8, 9, 10, 5):
        cupboard.put((round, "train"), memory, keep=3)
    assert kept(cupboard, (5, "train")) == [True]


def test_a_name_from_a_message_leads_nowhere_else(tmp_path: Path) -> None:
    place = tmp_path / "state" / "run"
    with pytest.raises(FedtailorError, match="expected the digest of what was sent"):
        put_maps(place, "../../evil", b"maps")
    with pytest.raises(FedtailorError, match="expected a round and train or calibrate"):
        Cupboard(place).put((1, "../../../evil"), {"p": torch.ones(2)}, keep=3)
    assert get_maps(place, "../../evil") is None
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_share_a_folder_share_their_maps(tmp_path: Path) -> None:
    """Another process is about to put the same map there: its half of a file is left alone."""
    frame = b"a map of masks"
    other = tmp_path / f"{digest_of(frame)}.levels.part"
    other.write_bytes(b"a map")
    put_maps(tmp_path, digest_of(frame), frame)
    assert other.read_bytes() == b"a map"
    assert (tmp_path / f"{digest_of(frame)}.levels").read_bytes() == frame
