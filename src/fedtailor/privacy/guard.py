"""A private round: who is drawn, which pieces tiers hold, what is paid, and what is released.

answers → clipped → sums over clients → ledger.pay (synced) → noise → what each tier's piece is from now on
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Tier
from fedtailor.merging.holders import mean_over_holders
from fedtailor.messages import Client, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.privacy.ledger import Ledger
from fedtailor.privacy.noise import normal
from fedtailor.privacy.sums import Ground, Piece, Sums, clipped, grounds, released, whole_or
from fedtailor.privacy.terms import Terms
from fedtailor.seeds import Seeds

LOOKED_AT = 4  # clients of a tier whose pieces are compared
KEPT_METRIC = "examples"  # what the server knows of its clients anyway, to count their work


@dataclass(frozen=True)
class Guard:
    """Stands between the answers of a round and its merge."""

    method: Method
    model: ElasticModel
    tiers: Sequence[Tier]
    terms: Terms
    ledger: Ledger
    seeds: Seeds  # of the run: public

    @property
    def hides(self) -> bool:
        """Whether there is noise; without it there is no secret either."""
        return any(self.terms.noises)

    @property
    def drawing(self) -> Seeds:
        """The seeds that clients are drawn by: nobody may know who takes part."""
        if not self.hides:
            return self.seeds
        return Seeds(int.from_bytes(self.ledger.key_for("cohort"), "little"))

    def cohort_size(self, clients: int, round: int, retry: int) -> int:
        """How many of so many clients are drawn; a Poisson sample has a size of its own in every round."""
        if self.terms.sampling != "poisson":
            return min(clients, self.terms.asked)
        draw = self.drawing.numpy("cohort size", round=round, step=retry or None)
        return int(draw.binomial(clients, self.terms.rate))

    def quiet(self, update: Update) -> Update:
        """An answer without what its client says about its data."""
        if not self.hides:
            return update
        kept = {name: value for name, value in update.metrics.items() if name == KEPT_METRIC}
        return replace(update, metrics=kept)

    def spent(self) -> dict[str, Any]:
        """For the record of a round: what every tier has spent so far."""
        if not self.hides:
            return {}
        return {
            "releases": self.ledger.paid,
            "delta": self.terms.delta,
            "epsilon": {tier: round(each, 6) for tier, each in self.ledger.epsilons().items()},
        }

    def release(self, state: ServerState, tasks: Sequence[Task], updates: Sequence[Update]) -> list[Update]:
        """What the merge is given in the place of clients' answers: for every tier, its piece after this round."""
        pieces = pieces_of(self.method, self.model, self.tiers, state, self.seeds)
        self._check_pieces(pieces, tasks)
        ground = grounds(state.weights, pieces, self.terms, self.model)
        sums = self._summed(state, ground, updates)
        filled = {name: each.filled(state.weights[name], ground[name]) for name, each in sums.items()}
        noise = self._noise(state.round, filled, ground)
        after = {
            name: released(state.weights[name], value, ground[name], noise.get(name))
            for name, value in filled.items()
        }
        if self.hides:
            after = {name: _as_allowed(name, value, self.model) for name, value in after.items()}
        after |= self._counted(state, ground, updates)
        return [
            Update(number, state.round, state.round, piece_of(self.model, after, piece), 1.0)
            for number, piece in enumerate(pieces)
            if self.terms.counts[number]
        ]

    def _check_pieces(self, pieces: Sequence[Piece], tasks: Sequence[Task]) -> None:
        number = {tier.name: place for place, tier in enumerate(self.tiers)}
        for task in tasks:
            piece = pieces[number[task.client.tier]]
            if (task.lease.cut, task.lease.names) != (piece.cut, piece.names):
                raise by_client(self.method.name)

    def _summed(
        self, state: ServerState, ground: Mapping[str, Ground], updates: Sequence[Update]
    ) -> dict[str, Sums]:
        """The clipped sums of all floating-point tensors, in the order of the clients."""
        floats = [name for name in ground if state.weights[name].is_floating_point()]
        sums = {name: Sums.nobody(state.weights[name]) for name in floats}
        for update in sorted(updates, key=lambda each: each.client):
            table = self.model.table(update.patch.cut)
            for name, value in clipped(state, update.patch, ground, self.terms, self.model).items():
                sums[name].take(whole_or(table.get(name), state.weights[name]), value)
        return sums

    def _counted(
        self, state: ServerState, ground: Mapping[str, Ground], updates: Sequence[Update]
    ) -> dict[str, Tensor]:
        """Whole numbers (batches that norms have seen): merged as ever without noise, and left alone with it."""
        found = {}
        tables = {update.client: self.model.table(update.patch.cut) for update in updates}
        for name in ground:
            old = state.weights[name]
            if old.is_floating_point():
                continue
            parts = [
                (tables[update.client].get(name), update.patch.values[name], 1.0)
                for update in sorted(updates, key=lambda each: each.client)
                if name in update.patch.values
            ]
            found[name] = old if self.hides or not parts else mean_over_holders(old, parts)
        return found

    def _noise(
        self, round: int, filled: Mapping[str, Tensor], ground: Mapping[str, Ground]
    ) -> dict[str, Tensor]:
        """Paid for before it is drawn; for every tensor by itself, of the deviation of each coordinate's ring."""
        if not self.hides:
            return {}
        mark = self.ledger.pay(round, _digest(filled))
        key = self.ledger.key_for(f"noise {round} {mark}")
        deviations = torch.tensor(
            [self.terms.deviation(ring) for ring in range(len(self.tiers))], dtype=torch.float64
        )
        found = {}
        for name, value in filled.items():
            drawn = normal(key, name, tuple(value.shape)).to(value.device)
            found[name] = drawn * deviations.to(value.device)[ground[name].ring.clamp(min=0)]
        return found


def pieces_of(
    method: Method,
    model: ElasticModel,
    tiers: Sequence[Tier],
    state: ServerState,
    seeds: Seeds,
    client: int = 0,
) -> list[Piece]:
    """What each tier is sent in a round, as a client of this number would be."""
    found = []
    for tier in tiers:
        lease = method.assign(state, Client(client, tier.name, tier.budget, 1), model, seeds).lease
        found.append(Piece(lease.cut, lease.names))
    return found


def tiers_alike(
    method: Method, model: ElasticModel, tiers: Sequence[Tier], state: ServerState, seeds: Seeds
) -> list[bool]:
    """For each tier whether all of its clients are sent the same piece in a round; a few of them are looked at."""
    begun = method.begin(state, model)
    sent = [pieces_of(method, model, tiers, begun, seeds, each) for each in range(LOOKED_AT)]
    return [all(piece == pieces[0] for piece in pieces) for pieces in zip(*sent, strict=True)]


def same_for_all(
    method: Method, model: ElasticModel, tiers: Sequence[Tier], state: ServerState, seeds: Seeds
) -> bool:
    """Whether the clients of every tier are sent the same piece in a round."""
    return all(tiers_alike(method, model, tiers, state, seeds))


def piece_of(model: ElasticModel, weights: Mapping[str, Tensor], piece: Piece) -> Patch:
    """The values of a tier's piece."""
    table = model.table(piece.cut)
    own = frozenset(name for name in piece.names if name in table)
    values = model.cut(dict(weights), piece.cut, own).values
    return Patch({**values, **{name: weights[name] for name in piece.names - own}}, piece.cut)


def by_client(method: str) -> FedtailorError:
    """The error for a method whose pieces differ between clients of a tier."""
    return FedtailorError(
        f"[privacy]: {method} gives each client a piece of its own, and how many hold a coordinate must be public; "
        "expected a method that gives all clients of a tier the same piece in a round, such as heterofl or fedrolex"
    )


def _as_allowed(name: str, value: Tensor, model: ElasticModel) -> Tensor:
    """Noise makes variances negative, whose root is NaN for everyone: the smallest that there is takes their place."""
    is_variance = name in model.statistics and not name.endswith(".running_mean")
    return value.clamp(min=0) if is_variance and value.is_floating_point() else value


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].cpu().contiguous().numpy().tobytes())
    return digest.digest()
