"""A device's side of secure aggregation: its secrets and its update stay here.

advertise, share, unmask    questions of their own; what leaves is public keys, sealed shares, and shares at the end
mask                        the task itself: the device trains, quantises and masks, and its answer is words under masks

Every step takes the secrets out of the safe; only where the next one needs them they are put back, before the answer
leaves. The configuration that came with the app decides: what a server says otherwise is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.flower.post import Head, Parcel
from fedtailor.engines.flower.safe import Safe
from fedtailor.errors import FedtailorError, unknown
from fedtailor.messages import Task, Update
from fedtailor.method import Method
from fedtailor.secure.charter import Charter
from fedtailor.secure.plain import (
    keys_of,
    keys_value,
    opening_value,
    participant_of,
    participant_value,
    table_of,
    texts_of,
    texts_value,
)
from fedtailor.secure.protocol import Participant
from fedtailor.secure.settings import SecureSettings
from fedtailor.secure.streams import Words, check_installed


@dataclass(frozen=True)
class Secrets:
    """A client's secrets and how far it has come in a round, out of its safe."""

    safe: Safe
    charter: Charter
    participant: Participant
    labels: tuple[str, ...] = ()  # the classes that it is asked for

    def rows(self, task: Task, update: Update, method: Method, model: ElasticModel) -> dict[str, Words]:
        """Its update under masks, class by class; the secrets are back in the safe before it leaves."""
        words = self.charter.words(task, update, method, model)
        sizes = {label: len(words[label]) if label in words else 0 for label in self.labels}
        if any(size != self.charter.lengths.get(label) for label, size in sizes.items()):
            raise FedtailorError("secure: classes have other sizes here: is the code of the same version?")
        rows = self.participant.rows({label: words[label] for label in self.labels})
        self.put_back()
        return rows

    @property
    def content(self) -> bytes:
        """All of it, as it lies in the safe."""
        value = {"charter": self.charter.value(), "participant": participant_value(self.participant)}
        return json.dumps(value).encode()

    def put_back(self) -> None:
        """Keep it for the next message."""
        self.safe.put(self.charter.plan.name, self.content)


@dataclass(frozen=True)
class Masking:
    """What the clients on this device do in rounds under masks."""

    settings: SecureSettings
    patience: float  # seconds of a round
    folder_of: Callable[[int], Path]  # where a client keeps what is its own

    def answer(self, parcel: Parcel) -> Parcel:
        """One step for each client that is asked; a client that takes no part says why."""
        check_installed()
        steps = {"advertise": self._advertise, "share": self._share, "unmask": self._unmask}
        step = str(parcel.head.get("step"))
        if step not in steps:
            raise unknown("step of a round under masks", step, steps)
        told: dict[str, Head] = {}
        for client in parcel.head.get("clients") or []:
            try:
                told[str(client)] = steps[step](int(client), parcel.head)
            except FedtailorError as error:
                told[str(client)] = {"error": str(error)}
        return Parcel({"told": told})

    def forget(self, folders: Iterable[Path]) -> None:
        """Remove secrets of rounds that were never brought to their end."""
        for folder in folders:
            Safe(folder, self.patience).clear(older=self.patience)

    def _safe(self, client: int) -> Safe:
        return Safe(self.folder_of(client), self.patience)

    def _advertise(self, client: int, head: Head) -> Head:
        charter = Charter.of(head.get("charter") or {}, self.settings)
        fresh = Secrets(self._safe(client), charter, Participant(client, charter.plan))
        if not fresh.safe.begin(charter.plan.name, fresh.content):
            raise FedtailorError(
                "secure: the server asks twice for keys; the client has given those of this round"
            )
        return {"keys": keys_value(fresh.participant.advertise())}

    def _taken(self, client: int, round_name: object) -> Secrets:
        safe = self._safe(client)
        content = safe.take(str(round_name))
        if content is None:
            raise FedtailorError(
                "secure: the client has no secrets of this round (any more); it takes no part"
            )
        value = json.loads(content)
        charter = Charter.of(value["charter"], self.settings)
        return Secrets(safe, charter, participant_of(value["participant"], charter.plan))

    def _share(self, client: int, head: Head) -> Head:
        held = self._taken(client, head.get("round"))
        try:
            shares = held.participant.share(table_of(head.get("keys"), keys_of))
        finally:
            held.put_back()  # before the shares leave; and where they are refused, nothing was told
        return {"shares": texts_value(shares)}

    def _unmask(self, client: int, head: Head) -> Head:
        held = self._taken(client, head.get("round"))  # and never put back
        sent = [int(each) for each in head.get("sent") or []]
        return {"opening": opening_value(held.participant.unmask(sent))}

    def begin_update(self, head: Head) -> Secrets:
        """Take the secrets out for an update, before the client trains; what is not asked under masks is refused."""
        asked = head.get("masked")
        if not isinstance(asked, dict) or head.get("action") != "train":
            raise in_clear(str(head.get("action")))
        held = self._taken(int(head["client"][0]), asked.get("round"))
        labels = tuple(str(label) for label in asked.get("classes") or ())
        try:
            held.participant.fix(texts_of(asked.get("shares")), labels)
        except FedtailorError:
            held.put_back()  # nothing was told
            raise
        return replace(held, labels=labels)


def in_clear(what: str) -> FedtailorError:
    """The error for a server that asks for what the configuration wants masked."""
    return FedtailorError(
        f"secure: the server asks for {what} in clear, and the run's configuration has [secure]; "
        "the client sends nothing"
    )
