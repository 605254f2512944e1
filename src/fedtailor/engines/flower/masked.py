"""Rounds under masks on Flower: clients hold their own secrets, and mask their updates themselves.

    advertise → keys of all → share → sealed shares, passed on → mask: the task and its answer → unmask → shares → sums

A step waits for its clients, the three short ones for at most a sixth of the round's time each, so that all of them end
within ``engine.deadline``. Whoever is missing in one is not asked in the next; who takes no part says why, which is an
event. This is an engine of the loop, and the parties of an ``Aggregation``: as a client's update the loop is given the
piece that it was sent, because there is nothing else to be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.flower.engine import FlowerEngine
from fedtailor.engines.flower.frames import masked_from
from fedtailor.engines.flower.post import Failed, Head, Parcel
from fedtailor.engines.protocol import Answer
from fedtailor.errors import FedtailorError, one_line
from fedtailor.messages import Measure, Refused, Task, Update
from fedtailor.secure.charter import Charter
from fedtailor.secure.plain import keys_of, keys_value, opening_of, shares_of_sender, texts_value
from fedtailor.secure.protocol import Collector, Keys, Plan, Sums, needed, rows_digest
from fedtailor.secure.streams import Words

SHORT = 1 / 6  # of a round's time: the longest that advertising, sharing and unmasking take, each of them
REFUSED = "secure refused"  # the event
T = TypeVar("T")


@dataclass
class Step(Generic[T]):
    """One question to several clients: what each of them told, and why the others did not."""

    name: str
    read: Callable[[int, Mapping[str, Any]], T]
    found: dict[int, T] = field(default_factory=dict)
    out: dict[int, str] = field(default_factory=dict)

    def take(self, clients: Sequence[int], answer: Parcel | Failed) -> None:
        """What a node answers for its clients; nothing of it is believed before it is read."""
        head = {"error": answer.reason} if isinstance(answer, Failed) else answer.head
        told, problem = head.get("told"), str(head.get("error") or "gave no answer")
        for client in clients:
            said = told.get(str(client)) if isinstance(told, dict) else None
            try:
                if not isinstance(said, dict) or "error" in said:
                    raise FedtailorError(str(said["error"]) if isinstance(said, dict) else problem)
                self.found[client] = self.read(client, said)
            except FedtailorError as error:
                self.out[client] = one_line(str(error))


@dataclass
class MaskedEngine:
    """Trains under masks what its inner engine would train in clear."""

    inner: FlowerEngine
    clock: Callable[[], float] = time.monotonic
    sent_bytes: int = 0
    charter: Charter | None = None
    keys: dict[int, Keys] = field(default_factory=dict)
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict)  # the cohort: what each sealed for whom
    rows: dict[int, dict[str, Words]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def begin(self, charter: Charter) -> None:
        """The next tasks are a round by this charter."""
        self.charter, self.keys, self.shares, self.rows = charter, {}, {}, {}
        self.sent_bytes, self.digests = 0, {}

    def measure(
        self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate"
    ) -> list[dict[str, float]]:
        """As ever, on the server's test examples."""
        return self.inner.measure(deployed, action)

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """The first three steps; of every client a result, and None when nothing has come for a moment."""
        if self.charter is None or any(task.action != "train" for task in tasks):
            raise FedtailorError("[secure]: clients are asked for their updates alone, in rounds under masks")
        charter, end = self.charter, self.clock() + (1 - SHORT) * self.inner.post.patience
        self.inner.ledger.tier_of |= {task.client.id: task.client.tier for task in tasks}
        alone = f"secure: fewer than secure.threshold = {charter.plan.threshold} clients hold its classes"
        out = {task.client.id: alone for task in tasks if task.client.id not in charter.plan.cohort}
        for client in out:
            self._note(client, "advertise", alone)
        yield from self._agree(charter, [task.client.id for task in tasks if task.client.id not in out], out)
        here = {task.client.id: task for task in tasks if task.client.id in self.shares}
        for task in tasks:
            if task.client.id not in here:
                yield Refused(task.client.id, task.round, "no-answer", out[task.client.id])
        yield from self._train(charter, here, end)

    def _agree(self, charter: Charter, clients: Sequence[int], out: dict[int, str]) -> Iterator[None]:
        """Keys, then shares; those with both are the cohort. ``out``: who is not in it, and why."""
        plan = charter.plan
        advertise = Step("advertise", lambda _, told: keys_of(told.get("keys")))
        yield from self._ask(advertise, clients, {"charter": charter.value()})
        keys = advertise.found
        share = Step("share", lambda client, told: shares_of_sender(told.get("shares"), client, plan, keys))
        if plan.enough(keys):
            asked = {str(client): keys_value(each) for client, each in keys.items()}
            yield from self._ask(share, sorted(keys), {"round": plan.name, "keys": asked})
        self.keys, sealed = keys, share.found
        self.sent_bytes = sum(len(text) for each in sealed.values() for text in each.values())
        self.sent_bytes += sum(len(each.sealing + each.masking) for each in keys.values())
        out |= {**advertise.out, **share.out}
        if plan.enough(sealed) and len(sealed) >= needed(len(keys)):
            self.shares = sealed
            return
        reason = (
            f"secure: {len(sealed)} of {len(clients)} clients have shared their keys, too few for any sum"
        )
        out |= {client: reason for client in clients if client not in out}
        self.inner.note(REFUSED, {"step": "share", "reason": reason})

    def _train(self, charter: Charter, tasks: Mapping[int, Task], end: float) -> Iterator[Answer | None]:
        """The third step: the tasks themselves, until there is time for the fourth alone."""
        lengths = {client: _asked_of(client, charter, self.shares) for client in tasks}
        beside = {client: self._beside(client, charter.plan, sorted(lengths[client])) for client in tasks}

        def read(
            head: object, pieces: Mapping[str, bytes], of: Mapping[int, Task], _model: ElasticModel
        ) -> Answer:
            answer, rows = masked_from(head, pieces, of, lengths)
            if isinstance(answer, Update):
                self.rows.setdefault(answer.client, rows)
            return answer

        missing = dict(tasks)
        for answer in self.inner.run(list(tasks.values()), beside, read):
            if answer is not None:
                missing.pop(answer.client, None)
            if isinstance(answer, Refused):
                self._note(answer.client, "mask", answer.detail or answer.reason)
            yield answer
            if self.clock() > end:
                break
        for client, task in missing.items():
            yield Refused(client, task.round, "late", "nothing had come when masks had to be taken off")

    def _beside(self, client: int, plan: Plan, labels: Sequence[str]) -> Head:
        """What a client is told with its task: what its peers have sealed for it, and which classes are wanted."""
        received = texts_value({sender: each[client] for sender, each in self.shares.items()})
        return {"masked": {"round": plan.name, "shares": received, "classes": labels}}

    def sums(self, charter: Charter, _tasks: Sequence[Task], updates: Sequence[Update]) -> Sums:
        """The fourth step, with those whose answers count; the sums that come of it, or none."""
        plan, sent = charter.plan, sorted(update.client for update in updates)
        if not sent or len(sent) < needed(len(self.keys)):
            return {}  # nobody would answer: all classes rest
        unmask = Step("unmask", lambda _, told: opening_of(told.get("opening"), plan, self.shares, sent))
        for _ in self._ask(unmask, sent, {"round": plan.name, "sent": sent}):
            pass
        masked = {client: self.rows[client] for client in sent}
        self.digests = {client: rows_digest(rows) for client, rows in masked.items()}
        self.sent_bytes += sum(each.nbytes for own in masked.values() for each in own.values())
        self.sent_bytes += sum(each.nbytes for each in unmask.found.values())
        try:
            return Collector(plan, self.keys).sums(masked, sorted(self.shares), unmask.found)
        except FedtailorError as error:  # too few, or shares of no one secret: the model stays as it is
            self.inner.note(REFUSED, {"step": "unmask", "reason": str(error)})
            return {}

    def _ask(self, step: Step[T], clients: Sequence[int], question: Head) -> Iterator[None]:
        """Ask clients for one step, for a limited time; whoever takes no part is an event."""
        end = self.clock() + SHORT * self.inner.post.patience
        waiting, of_node = self.inner.ask(
            clients, {"ask": "secure", "step": step.name, **question}, step.name
        )
        for node, answer in self.inner.heard(waiting):
            if answer is None:
                yield None
            else:
                if isinstance(answer, Parcel):
                    self.inner.ledger.heard(of_node[node], answer)
                step.take(of_node[node], answer)
            if self.clock() > end:
                break
        for client in clients:
            if client not in step.found:
                step.out.setdefault(client, "not connected, or no answer in time")
                self._note(client, step.name, step.out[client])

    def _note(self, client: int, step: str, reason: str) -> None:
        self.inner.note(REFUSED, {"client": self.inner.roster.name(client), "step": step, "reason": reason})


def _asked_of(client: int, charter: Charter, cohort: Mapping[int, object]) -> dict[str, int]:
    """The classes that a client is asked for, and how many words each has."""
    wanted = charter.plan.enough(cohort)
    return {label: charter.lengths[label] for label in charter.plan.labels(client) if label in wanted}
