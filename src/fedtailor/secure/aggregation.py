"""A round under masks: every client's answer goes through the protocol, and the merge is given sums alone.

In a simulation both sides run in this process: what is shown is that sums come out right and what each message tells,
not that the owner of the process learns nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import Tier
from fedtailor.merging import WEIGHTINGS
from fedtailor.messages import ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.privacy.guard import piece_of, pieces_of
from fedtailor.privacy.sums import sent_to
from fedtailor.secure.coverage import Coverage, at_full_size
from fedtailor.secure.protocol import Collector, Participant, Plan, needed
from fedtailor.secure.quantising import Scale
from fedtailor.secure.settings import SecureSettings
from fedtailor.secure.streams import Words
from fedtailor.seeds import Seeds

KEPT_METRIC = "examples"


@dataclass
class Aggregation:
    """Stands between the answers of a round and its merge, as a guard does."""

    method: Method
    model: ElasticModel
    tiers: Sequence[Tier]
    settings: SecureSettings
    seeds: Seeds
    rested: dict[str, int] = field(
        default_factory=dict
    )  # classes that rested in the last round: who was there
    sent_bytes: int = 0  # by all clients in the last round

    def quiet(self, update: Update) -> Update:
        """An answer without what its client says in clear."""
        return replace(
            update, metrics={name: each for name, each in update.metrics.items() if name == KEPT_METRIC}
        )

    def spent(self) -> dict[str, Any]:
        """For the record: classes that rested, and how many clients these had."""
        return {"rested": dict(self.rested), "bytes": self.sent_bytes}

    def release(self, state: ServerState, tasks: Sequence[Task], updates: Sequence[Update]) -> list[Update]:
        """What the merge is given in the place of clients' answers: for every tier, its piece after this round."""
        pieces = pieces_of(self.method, self.model, self.tiers, state, self.seeds)
        coverage = Coverage.of(state.weights, pieces, [tier.name for tier in self.tiers], self.model)
        after = {name: state.weights[name].double().cpu() for name in coverage.held}
        most = self._most_weight(tasks)
        plan = self._plan(state, coverage, tasks)
        scales = {
            label: Scale(len(members), self.settings.range, most) for label, members in plan.classes.items()
        }
        words = {update.client: self._words(state, coverage, scales, tasks, update) for update in updates}
        summed = self._summed(plan, words) if plan.classes else {}
        self.rested = self._resting(coverage, tasks, summed)
        for label, (total, senders) in summed.items():
            coverage.put_back(after, label, scales[label].mean(total, len(senders)))
        whole = {**state.weights, **{name: value.to(state.weights[name]) for name, value in after.items()}}
        return [
            Update(number, state.round, state.round, piece_of(self.model, whole, piece), 1.0)
            for number, piece in enumerate(pieces)
        ]

    def _most_weight(self, tasks: Sequence[Task]) -> int:
        by_count = self.method.weighting == "count"
        return 1 if by_count else max((task.client.num_examples for task in tasks), default=1)

    def _plan(self, state: ServerState, coverage: Coverage, tasks: Sequence[Task]) -> Plan:
        """Of this round: its name has a random part, so that a round that is repeated is another round."""
        tier_of = {task.client.id: task.client.tier for task in tasks}
        members = {
            label: sorted(client for client, tier in tier_of.items() if tier in coverage.members(bits))
            for label, bits in coverage.classes.items()
        }
        enough = {label: each for label, each in members.items() if len(each) >= self.settings.threshold}
        digest = hashlib.sha256(repr(sorted(members.items())).encode()).hexdigest()
        name = f"round {state.round} {digest} {secrets.token_hex(16)}"
        return Plan(name, enough, self.settings.threshold)

    def _words(
        self,
        state: ServerState,
        coverage: Coverage,
        scales: Mapping[str, Scale],
        tasks: Sequence[Task],
        update: Update,
    ) -> dict[str, Words]:
        """On the client: its difference, class by class, quantised."""
        tier = next(task.client.tier for task in tasks if task.client.id == update.client)
        before = sent_to(state, update.patch, self.model)
        steps = {
            name: (value.double() - before[name].double()).cpu()
            for name, value in update.patch.values.items()
            if value.is_floating_point()
        }
        full = at_full_size(steps, state.weights, self.model.table(update.patch.cut))
        weight = int(WEIGHTINGS[self.method.weighting](update))
        rows = coverage.rows(full, tier)
        return {label: scales[label].words(row, weight) for label, row in rows.items() if label in scales}

    def _summed(
        self, plan: Plan, words: Mapping[int, Mapping[str, Words]]
    ) -> dict[str, tuple[Words, list[int]]]:
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
        sealed = sum(len(text) for each in shares.values() for text in each.values())
        opened = sum(
            len(text) for each in openings.values() for text in (*each.selves.values(), *each.keys.values())
        )
        rows = sum(each.nbytes for own in masked.values() for each in own.values())
        self.sent_bytes = 64 * len(keys) + sealed + opened + rows
        return Collector(plan, keys).sums(masked, plan.cohort, openings)

    def _resting(
        self, coverage: Coverage, tasks: Sequence[Task], summed: Mapping[str, object]
    ) -> dict[str, int]:
        """Classes without a sum, and how many clients were asked for them."""
        return {
            label: sum(task.client.tier in coverage.members(bits) for task in tasks)
            for label, bits in coverage.classes.items()
            if label not in summed
        }
