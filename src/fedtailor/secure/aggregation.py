"""A round under masks: every client's answer goes through the protocol, and the merge is given sums alone.

before   the charter of the round is fixed, and those who hold the secrets begin
answers  of clients that mask what they send (on Flower), or in clear (in a simulation, which plays both sides)
release  sums, class by class → means → what each tier's piece is from now on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import Tier
from fedtailor.messages import ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.privacy.guard import KEPT_METRIC, piece_of, pieces_of
from fedtailor.privacy.sums import Piece
from fedtailor.secure.charter import Charter
from fedtailor.secure.coverage import Coverage
from fedtailor.secure.protocol import Sums
from fedtailor.secure.settings import SecureSettings
from fedtailor.seeds import Seeds


@runtime_checkable
class Parties(Protocol):
    """Those who hold the secrets of a round: this process for all clients, or each client for itself."""

    sent_bytes: int  # by all clients in the last round
    digests: dict[int, str]  # of what each client has sent under masks

    def begin(self, charter: Charter) -> None:
        """A round by this charter is about to be held."""
        ...

    def sums(self, charter: Charter, tasks: Sequence[Task], updates: Sequence[Update]) -> Sums:
        """Of every class in which enough of those with an update have sent, the sum."""
        ...


@dataclass
class Aggregation:
    """Stands between the answers of a round and its merge, as a guard does."""

    method: Method
    model: ElasticModel
    tiers: Sequence[Tier]
    settings: SecureSettings
    seeds: Seeds
    parties: Parties
    charter: Charter | None = None  # of the last try of a round
    rested: dict[str, int] = field(
        default_factory=dict
    )  # classes that rested in the last round: who was there

    def quiet(self, update: Update) -> Update:
        """An answer without what its client says in clear."""
        return replace(
            update, metrics={name: each for name, each in update.metrics.items() if name == KEPT_METRIC}
        )

    def spent(self) -> dict[str, Any]:
        """For the record: classes that rested, and how many clients these had."""
        return {"rested": dict(self.rested), "bytes": self.parties.sent_bytes}

    @property
    def digests(self) -> Mapping[int, str]:
        """Of what each client has sent in the last round: its words under masks."""
        return self.parties.digests

    def begin(self, state: ServerState, tasks: Sequence[Task]) -> None:
        """Fix the charter of a try, before anybody is asked."""
        pieces = pieces_of(self.method, self.model, self.tiers, state, self.seeds)
        coverage = self._coverage(state, pieces)
        self.charter = Charter.new(
            state.round, coverage, pieces, tasks, self.settings, self._most_weight(tasks)
        )
        self.parties.begin(self.charter)

    def release(self, state: ServerState, tasks: Sequence[Task], updates: Sequence[Update]) -> list[Update]:
        """What the merge is given in the place of clients' answers: for every tier, its piece after this round."""
        assert self.charter is not None  # a round that is released was begun
        coverage = self._coverage(state, self.charter.pieces)
        after = {name: state.weights[name].double().cpu() for name in coverage.held}
        summed = self.parties.sums(self.charter, tasks, updates)
        self.rested = _resting(coverage, tasks, summed)
        for label, (total, senders) in summed.items():
            coverage.put_back(after, label, self.charter.scale(label).mean(total, len(senders)))
        whole = {**state.weights, **{name: value.to(state.weights[name]) for name, value in after.items()}}
        return [
            Update(number, state.round, state.round, piece_of(self.model, whole, piece), 1.0)
            for number, piece in enumerate(self.charter.pieces)
        ]

    def _coverage(self, state: ServerState, pieces: Sequence[Piece]) -> Coverage:
        return Coverage.of(state.weights, pieces, [tier.name for tier in self.tiers], self.model)

    def _most_weight(self, tasks: Sequence[Task]) -> int:
        by_count = self.method.weighting == "count"
        return 1 if by_count else max((task.client.num_examples for task in tasks), default=1)


def _resting(coverage: Coverage, tasks: Sequence[Task], summed: Mapping[str, object]) -> dict[str, int]:
    """Classes without a sum, and how many clients were asked for them."""
    return {
        label: sum(task.client.tier in coverage.members(bits) for task in tasks)
        for label, bits in coverage.classes.items()
        if label not in summed
    }
