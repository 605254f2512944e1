"""The charter of a round: what is public before anybody trains. Who is in which class, which piece each tier holds, how
differences become whole numbers. A client works out its words by it, wherever it runs.

The name of a round holds the digest of its charter, and masks are derived from the name: clients that are told
different ones make masks that do not cancel.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError, require
from fedtailor.merging import WEIGHTINGS
from fedtailor.messages import Task, Update
from fedtailor.method import Method
from fedtailor.privacy.sums import Piece
from fedtailor.secure.coverage import Coverage
from fedtailor.secure.protocol import Plan
from fedtailor.secure.quantising import Scale
from fedtailor.secure.settings import SecureSettings
from fedtailor.secure.streams import Words


@dataclass(frozen=True)
class Charter:
    """Of one try of a round."""

    plan: Plan
    tiers: Sequence[str]
    pieces: Sequence[Piece]  # of each tier
    lengths: Mapping[str, int]  # words of each class
    range: float  # how far a weight may move
    most: int  # the largest weight that a client may have

    @classmethod
    def new(cls, round: int, coverage: Coverage, pieces: Sequence[Piece], tasks: Sequence[Task],
            settings: SecureSettings, most: int) -> Charter:  # fmt: skip
        """Of a round that is about to be held; one that is repeated is another."""
        tier_of = {task.client.id: task.client.tier for task in tasks}
        members = {
            label: sorted(client for client, tier in tier_of.items() if tier in coverage.members(bits))
            for label, bits in coverage.classes.items()
        }
        enough = {label: each for label, each in members.items() if len(each) >= settings.threshold}
        lengths = {label: coverage.words(label) for label in enough}
        plan = Plan("", enough, settings.threshold)
        return cls(plan, coverage.tiers, pieces, lengths, settings.range, most).named(round)

    def named(self, round: int) -> Charter:
        """The same under a name that nobody uses twice, and that holds its digest."""
        name = f"round {round} {_digest(self.value())} {secrets.token_hex(16)}"
        return replace(self, plan=replace(self.plan, name=name))

    def value(self) -> dict[str, Any]:
        """Plain values, for a message."""
        return {
            "name": self.plan.name,
            "classes": {label: list(members) for label, members in self.plan.classes.items()},
            "threshold": self.plan.threshold,
            "tiers": list(self.tiers),
            "pieces": [{"cut": cut_value(each.cut), "names": sorted(each.names)} for each in self.pieces],
            "lengths": dict(self.lengths),
            "range": self.range,
            "most": self.most,
        }

    @classmethod
    def of(cls, value: Mapping[str, Any], settings: SecureSettings) -> Charter:
        """What a server has sent, if it goes by the client's own configuration."""
        try:
            plan = Plan(
                str(value["name"]),
                {str(label): [int(each) for each in members] for label, members in value["classes"].items()},
                int(value["threshold"]),
            )
            pieces = [Piece(cut_from(each["cut"]), frozenset(each["names"])) for each in value["pieces"]]
            lengths = {str(label): int(length) for label, length in value["lengths"].items()}
            found = cls(
                plan, list(value["tiers"]), pieces, lengths, float(value["range"]), int(value["most"])
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FedtailorError(f"secure: no charter of a round: {error!r}") from None
        if plan.name.split(" ")[2:3] != [_digest(value)]:
            raise FedtailorError("secure: the round is not named by its charter; the client takes no part")
        require(plan.threshold == settings.threshold > 0, "secure.threshold", plan.threshold,
                f"{settings.threshold}, as in the configuration of this client")  # fmt: skip
        require(found.range == settings.range, "secure.range", found.range, f"{settings.range}, as here")
        return found

    def scale(self, label: str) -> Scale:
        """How the members of a class quantise."""
        return Scale(len(self.plan.classes[label]), self.range, self.most)

    def words(self, task: Task, update: Update, method: Method, model: ElasticModel) -> dict[str, Words]:
        """On the client: its difference, class by class, quantised, with its weight."""
        own = list(self.tiers).index(task.client.tier)
        piece = self.pieces[own]
        if (task.lease.cut, task.lease.names) != (piece.cut, piece.names):
            raise FedtailorError(
                f"secure: the task is not the piece of tier {task.client.tier} in this round; the client takes no part"
            )
        coverage = Coverage.inside(own, update.patch.values, self.pieces, self.tiers, model)
        before = model.narrow(task.patch, update.patch.cut).values
        weight = int(WEIGHTINGS[method.weighting](update))
        steps = {
            name: (value.double() - before[name].double()).cpu()
            for name, value in update.patch.values.items()
            if value.is_floating_point()
        }
        rows = coverage.rows(steps, task.client.tier)
        return {
            label: self.scale(label).words(row, weight)
            for label, row in rows.items()
            if label in self.plan.classes
        }


def _digest(value: Mapping[str, Any]) -> str:
    told = {name: each for name, each in value.items() if name != "name"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
