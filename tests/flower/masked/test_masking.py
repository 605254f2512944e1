"""A client against a server that cheats, and a server against clients that send odd messages; no run, no network."""

from __future__ import annotations

import json
import stat
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra fedtailor[secure] is not installed")

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.engines.flower.frames import masked_from
from fedtailor.engines.flower.post import Parcel
from fedtailor.engines.flower.safe import Safe
from fedtailor.errors import FedtailorError
from fedtailor.flower.masking import Masking
from fedtailor.messages import Refused, Update
from fedtailor.privacy.sums import Piece
from fedtailor.secure.charter import Charter
from fedtailor.secure.plain import keys_of, opening_of, shares_of_sender
from fedtailor.secure.protocol import Plan
from fedtailor.secure.settings import SecureSettings
from fedtailor.storage.wire import DecodeError
from helpers import mlp_model, task_for

CLASSES = {"0.5+1": [0, 1, 2, 3, 4, 5], "1": [3, 4, 5]}
SETTINGS = SecureSettings(threshold=2)


def charter(threshold: int = 2) -> Charter:
    piece = Piece(Cut.everything(), frozenset({"weight"}))
    plan = Plan("", CLASSES, threshold)
    return Charter(plan, ["0.5", "1"], [piece, piece], {"0.5+1": 3, "1": 2}, 1.0, 1).named(0)


class Fleet:
    """Six clients, and a server that asks them one step after the other."""

    def __init__(self, folder: Path) -> None:
        self.charter = charter()
        self.clients = {n: Masking(SETTINGS, 60.0, lambda n: folder / f"client{n}") for n in range(6)}
        told = [self.ask(n, "advertise", charter=self.charter.value()) for n in self.clients]
        self.keys = {str(n): each["keys"] for n, each in enumerate(told)}

    def ask(self, client: int, step: str, **question: Any) -> Any:
        """What a client tells; heads have travelled as JSON."""
        head = {"step": step, "clients": [client], "round": self.charter.plan.name, **question}
        return self.clients[client].answer(Parcel(json.loads(json.dumps(head)))).head["told"][str(client)]

    def share(self) -> dict[int, dict[str, str]]:
        """What every client has received when all have shared."""
        sealed = [self.ask(n, "share", keys=self.keys)["shares"] for n in self.clients]
        return {n: {str(sender): each[str(n)] for sender, each in enumerate(sealed)} for n in self.clients}

    def update(self, client: int, received: dict[str, str], classes: list[str], action: str = "train") -> Any:
        """Ask for an update."""
        asked = {"round": self.charter.plan.name, "shares": received, "classes": classes}
        return self.clients[client].begin_update({"client": [client], "action": action, "masked": asked})

    def mask(self, client: int, received: dict[str, str], classes: list[str]) -> dict[str, Any]:
        """The step without training: words of zeros under masks."""
        held = self.update(client, received, classes)
        rows = {label: np.zeros(self.charter.lengths[label], np.uint32) for label in classes}
        found = held.participant.rows(rows)
        held.put_back()
        return found


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_client_refuses_a_charter_that_is_not_that_of_its_configuration(fleet: Fleet) -> None:
    lower = {**charter().value(), "classes": {"0.5+1": [0, 1], "1": [3]}}
    assert "not named by its charter" in fleet.ask(0, "advertise", charter=lower)["error"]
    assert (
        "expected 2, as in the configuration"
        in fleet.ask(0, "advertise", charter=charter(3).value())["error"]
    )
    assert "no charter of a round" in fleet.ask(0, "advertise", charter={"name": "round"})["error"]


def test_a_client_refuses_two_with_one_key_and_a_list_without_its_own(fleet: Fleet) -> None:
    wrong = "the list of keys is not that of this round"
    assert wrong in fleet.ask(0, "share", keys={**fleet.keys, "1": fleet.keys["2"]})["error"]
    assert (
        wrong in fleet.ask(0, "share", keys={n: each for n, each in fleet.keys.items() if n != "0"})["error"]
    )
    assert "shares" in fleet.ask(0, "share", keys=fleet.keys)  # nothing was told: it can still take part


def test_a_client_refuses_small_classes_and_small_cohorts_before_it_trains(fleet: Fleet) -> None:
    received = fleet.share()
    few = {sender: text for sender, text in received[3].items() if sender in ("0", "1", "3")}
    with pytest.raises(FedtailorError, match="too few clients have shared their keys"):
        fleet.update(3, few, ["0.5+1"])
    alone = {sender: text for sender, text in received[3].items() if sender in ("0", "1", "2", "3")}
    with pytest.raises(FedtailorError, match=r"1 clients in class 1, fewer than secure\.threshold = 2"):
        fleet.update(3, alone, ["0.5+1", "1"])
    with pytest.raises(FedtailorError, match="asks for validate in clear"):
        fleet.update(3, received[3], ["1"], action="validate")
    fleet.mask(3, received[3], ["0.5+1", "1"])
    with pytest.raises(FedtailorError, match="asks twice for an update"):
        fleet.update(3, received[3], ["1"])


@pytest.mark.parametrize(
    ("sent", "why"),
    [([0, 1, 3], "3 clients have sent, fewer than 4 of 6"), ([0, 1, 2, 4], "leaves this client out"),
     ([0, 1, 2, 3, 9], "names others")],
)  # fmt: skip
def test_a_client_that_is_told_a_wrong_list_says_nothing_any_more(
    sent: list[int], why: str, fleet: Fleet
) -> None:
    fleet.mask(3, fleet.share()[3], ["0.5+1", "1"])
    told = fleet.ask(3, "unmask", sent=sent)
    assert why in told["error"]
    assert "has no secrets" in fleet.ask(3, "unmask", sent=[0, 1, 2, 3, 4, 5])["error"]


def test_the_self_masks_of_a_class_that_too_few_have_sent_stay_secret(fleet: Fleet) -> None:
    """Of class 1 one member is left: with its self-mask the server could read its row."""
    received = fleet.share()
    for client in (0, 1, 2, 3):
        fleet.mask(client, received[client], sorted({"0.5+1", *(["1"] if client == 3 else [])}))
    told = fleet.ask(0, "unmask", sent=[0, 1, 2, 3])["opening"]
    assert set(told["selves"]["3"]) == {"0.5+1"}
    assert set(told["keys"]) == {"4", "5"}


def test_what_clients_send_is_read_strictly(fleet: Fleet) -> None:
    received, plan = fleet.share(), fleet.charter.plan
    for odd, why in ((b64encode(bytes(31)).decode(), "31 bytes instead of 32"), ("ü", "no text of bytes"),
                     (b64encode(bytes(32)).decode(), "nothing secret can be agreed on")):  # fmt: skip
        with pytest.raises(FedtailorError, match=why):
            keys_of([fleet.keys["0"][0], odd])
    own = {to: received[int(to)]["0"] for to in fleet.keys}
    assert shares_of_sender(own, 0, plan, range(6)).keys() == set(range(6))
    for odd in ({**own, "1": own["1"][:-4]}, {n: own[n] for n in "012"}, {**own, "-1": own["1"]}, "all"):
        with pytest.raises(FedtailorError, match="secure: "):
            shares_of_sender(odd, 0, plan, range(6))
    for client in range(6):
        fleet.mask(client, received[client], plan.labels(client))
    opening = fleet.ask(0, "unmask", sent=[0, 1, 2, 3, 4])["opening"]
    assert opening_of(opening, plan, range(6), [0, 1, 2, 3, 4]).keys.keys() == {5}
    more = {
        **opening,
        "keys": {**opening["keys"], "4": opening["keys"]["5"]},
    }  # both kinds of share of one client
    for odd in (more, {**opening, "selves": {}}, {}, None):
        with pytest.raises(FedtailorError, match="secure: "):
            opening_of(odd, plan, range(6), [0, 1, 2, 3, 4])


def test_words_are_read_against_what_was_asked() -> None:
    task = task_for(mlp_model())
    frame, lengths = np.arange(5, dtype="<u4").tobytes(), {task.client.id: {"a": 2, "b": 3}}
    head = {
        "update": [task.client.id, task.round, task.round], "metrics": {"examples": 3.0}, "piece": "x", "kept": False,
        "lost": False, "nonce": "n", "classes": ["a", "b"], "words": "<u4",
    }  # fmt: skip
    answer, rows = masked_from(head, {"x": frame}, {task.client.id: task}, lengths)
    assert isinstance(answer, Update)
    assert {label: row.tolist() for label, row in rows.items()} == {"a": [0, 1], "b": [2, 3, 4]}
    assert answer.patch.values.keys() == task.lease.names  # what it was sent: nothing else is known
    for odd, wrong in (
        ({}, frame[:-1]),
        ({}, frame + frame),
        ({"words": "<f4"}, frame),
        ({"classes": ["a"]}, frame),
    ):
        refused, rows = masked_from({**head, **odd}, {"x": wrong}, {task.client.id: task}, lengths)
        assert isinstance(refused, Refused)
        assert refused.reason == "unreadable"
        assert not rows
    for odd in ({"update": [9, 0, 0]}, {"piece": "y"}, {"metrics": 3}):
        with pytest.raises(DecodeError):
            masked_from({**head, **odd}, {"x": frame}, {task.client.id: task}, lengths)


def test_a_safe_gives_secrets_once_and_forgets_old_ones(tmp_path: Path) -> None:
    now = 0.0
    safe = Safe(tmp_path / "client", 60.0, lambda: now)
    assert safe.begin("first", b"one")
    assert not safe.begin("first", b"another")
    (file,) = (tmp_path / "client").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert safe.take("first") == b"one"
    assert safe.take("first") is None
    safe.put("first", b"one")
    assert safe.begin("second", b"two")  # the first round is over
    assert safe.take("first") is None
    now = file.parent.stat().st_mtime + 61.0
    assert safe.take("second") is None
    assert not list((tmp_path / "client").iterdir())
