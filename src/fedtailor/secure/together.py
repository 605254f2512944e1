"""All sides of the protocol in one process, for simulations.

What it shows is that sums come out right and what each message tells, not that the owner of the process learns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Task, Update
from fedtailor.method import Method
from fedtailor.secure.charter import Charter
from fedtailor.secure.protocol import Collector, Participant, Plan, Sums, needed, rows_digest
from fedtailor.secure.streams import Words


@dataclass
class Together:
    """Clients answer in clear, and all messages of a round are made afterwards: who did not answer has dropped out."""

    method: Method
    model: ElasticModel
    sent_bytes: int = 0
    digests: dict[int, str] = field(default_factory=dict)

    def begin(self, _charter: Charter) -> None:
        """Nothing is agreed on before answers are there."""
        self.sent_bytes, self.digests = 0, {}

    def sums(self, charter: Charter, tasks: Sequence[Task], updates: Sequence[Update]) -> Sums:
        """Of every class with enough clients the sum of their words."""
        asked = {task.client.id: task for task in tasks}
        words = {
            update.client: charter.words(asked[update.client], update, self.method, self.model)
            for update in updates
        }
        return self.summed(charter.plan, words) if charter.plan.classes else {}

    def summed(self, plan: Plan, words: Mapping[int, Mapping[str, Words]]) -> Sums:
        """All four steps; clients that have no words have dropped out after they shared their keys."""
        clients = {client: Participant(client, plan) for client in plan.cohort}
        keys = {client: each.advertise() for client, each in clients.items()}
        shares = {client: each.share(keys) for client, each in clients.items()}
        arrived = {client: {sender: shares[sender][client] for sender in clients} for client in clients}
        alive = sorted(client for client in words if client in clients)
        if len(alive) < needed(len(clients)):
            return {}  # nobody can take off the masks: all classes rest
        masked = {client: clients[client].masked(arrived[client], words[client]) for client in alive}
        openings = {client: clients[client].unmask(alive) for client in alive}
        self.digests = {client: rows_digest(rows) for client, rows in masked.items()}
        sealed = sum(len(text) for each in shares.values() for text in each.values())
        rows = sum(each.nbytes for own in masked.values() for each in own.values())
        opened = sum(each.nbytes for each in openings.values())
        self.sent_bytes = 64 * len(keys) + sealed + opened + rows
        return Collector(plan, keys).sums(masked, plan.cohort, openings)
