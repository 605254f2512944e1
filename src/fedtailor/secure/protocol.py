"""The protocol of one round, class by class (Bonawitz et al., "Practical Secure Aggregation", CCS 2017).

    advertise   client → server   public keys                  the server sends all of them to all
    share       client → clients  sealed shares of its two secrets, through the server. The cohort is fixed from here on
    mask        client → server   y = q + G(b_i) + sum_{j > i} G(s_ij) - sum_{j < i} G(s_ij)   (mod 2^32), each class
    unmask      client → server   of each peer one share: of b_j if it has sent, of its key if it has not

A *class* is the coordinates that the same tiers hold; its members are the clients of these tiers, and masks are agreed
among them alone. A client has a self-mask b_i for every class, of which shares are given out only where enough members
have sent: the server is left with their sum, and with nothing of a class in which these are fewer than the threshold.

Each side is one class, wherever it runs: ``together`` plays all of them in one process, on Flower a ``Participant``
lies on its client's disk between two messages.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedtailor.errors import FedtailorError
from fedtailor.secure.shamir import SECRET_BYTES, SHARE_BYTES, secret_of, shares_of
from fedtailor.secure.streams import Pair, Words, agreed, derived, mask, opened, sealed

Classes = Mapping[str, Sequence[int]]  # name of a class -> its members, the clients of its tiers
Sums = dict[
    str, tuple[Words, list[int]]
]  # of a class: the sum of the words of those who have sent, and who these are


def needed(clients: int) -> int:
    """How many clients of a cohort must be there at the end: two thirds, so that three of ten may drop out."""
    return -(-2 * clients // 3)


@dataclass(frozen=True)
class Plan:
    """What is public about a round: its name, which nobody uses twice, who is in which class, and the threshold."""

    name: str
    classes: Classes
    threshold: int

    @property
    def cohort(self) -> list[int]:
        """All clients of the round."""
        return sorted({client for members in self.classes.values() for client in members})

    def purpose(self, label: str) -> str:
        """What a mask of a class is for."""
        return f"{self.name} {label}"

    def labels(self, client: int) -> list[str]:
        """The classes of a client."""
        return sorted(label for label, members in self.classes.items() if client in members)

    def enough(self, among: Collection[int]) -> list[str]:
        """The classes of which at least as many as the threshold are among these."""
        return sorted(
            label
            for label, members in self.classes.items()
            if len(set(members) & set(among)) >= self.threshold
        )


@dataclass(frozen=True)
class Keys:
    """The public keys of a client: for sealing shares, and for masks."""

    sealing: bytes
    masking: bytes


@dataclass(frozen=True)
class Opening:
    """What a client says at the end: of each peer one kind of share."""

    selves: Mapping[int, Mapping[str, bytes]]  # of the self-masks of those who have sent, class by class
    keys: Mapping[int, bytes]  # of the keys of those who have not

    @property
    def nbytes(self) -> int:
        """The bytes of all shares."""
        selves = (share for own in self.selves.values() for share in own.values())
        return sum(map(len, (*selves, *self.keys.values())))


def expected_opening(
    plan: Plan, cohort: Collection[int], sent: Collection[int]
) -> dict[int, list[str] | None]:
    """Of whom an opening holds which shares: the classes of their self-masks, or None for their key."""
    open_to_all = plan.enough(sent)
    return {
        peer: [label for label in plan.labels(peer) if label in open_to_all] if peer in sent else None
        for peer in sorted(cohort)
    }


@dataclass
class Participant:
    """One client in one round; its secrets are new, and are gone with it. Every step is taken once."""

    client: int
    plan: Plan
    sealing: Pair = field(default_factory=Pair.new, repr=False)
    masking: Pair = field(default_factory=Pair.new, repr=False)
    selves: dict[str, bytes] = field(
        default_factory=dict, repr=False
    )  # the secret of its self-mask, by class
    peers: dict[int, Keys] = field(default_factory=dict, repr=False)
    received: dict[int, bytes] = field(default_factory=dict, repr=False)
    said: bool = False

    def __post_init__(self) -> None:
        if not self.selves:
            self.selves = {
                label: secrets.token_bytes(SECRET_BYTES) for label in self.plan.labels(self.client)
            }

    def advertise(self) -> Keys:
        """Its public keys."""
        return Keys(self.sealing.public, self.masking.public)

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """For every peer, sealed, a share of its masking key and one of each self-mask."""
        if self.peers:
            raise FedtailorError("secure: the server asks twice for shares; the client takes no part")
        fresh = {each.masking for each in keys.values()} | {each.sealing for each in keys.values()}
        own = keys.get(self.client) == self.advertise()
        if not own or len(fresh) != 2 * len(keys) or not set(keys) <= set(self.plan.cohort):
            raise FedtailorError(
                "secure: the list of keys is not that of this round; the client takes no part"
            )
        self.peers = dict(keys)
        holders, least = [client + 1 for client in sorted(keys)], needed(len(keys))
        told = [self.masking.private, *(self.selves[label] for label in self.plan.labels(self.client))]
        shares = [shares_of(each, least, holders) for each in told]
        return {
            peer: sealed(
                self._secret_with(peer),
                self._way(self.client, peer),
                b"".join(each[peer + 1] for each in shares),
            )
            for peer in keys
        }

    def _secret_with(self, peer: int) -> bytes:
        return agreed(self.sealing.private, self.peers[peer].sealing)

    def _way(self, sender: int, receiver: int) -> str:
        return f"{self.plan.name} {sender} to {receiver}"

    def masked(self, received: Mapping[int, bytes], values: Mapping[str, Words]) -> dict[str, Words]:
        """Its values of every class under masks; ``received`` are the shares of the cohort, which is fixed by them."""
        self.fix(received, values)
        return self.rows(values)

    def fix(self, received: Mapping[int, bytes], labels: Collection[str]) -> None:
        """Settle who takes part, before it trains: nobody else is masked with, and no class with fewer is sent."""
        if self.received:
            raise FedtailorError(
                "secure: the server asks twice for an update, and two under one mask tell their difference; "
                "the client takes no part"
            )
        few = len(received) < needed(len(self.peers))
        if few or not set(received) <= set(self.peers) or self.client not in received:
            raise FedtailorError("secure: too few clients have shared their keys; the client takes no part")
        for label in labels:
            members = set(self.plan.classes.get(label, ())) & set(received)
            if self.client not in members or len(members) < self.plan.threshold:
                raise FedtailorError(
                    f"secure: {len(members)} clients in class {label}, fewer than secure.threshold = "
                    f"{self.plan.threshold}; the client does not send it"
                )
        self.received = dict(received)

    def rows(self, values: Mapping[str, Words]) -> dict[str, Words]:
        """Values under the masks of those who take part; once."""
        found = {}
        for label, words in values.items():
            total = words + mask(self.selves[label], self.plan.purpose(label), len(words))
            for peer in (each for each in self.plan.classes[label] if each in self.received):
                if peer != self.client:
                    total = total + pair_mask(self.masking.private, self.peers[peer].masking, self.plan, label,
                                              len(words), self.client < peer)  # fmt: skip
            found[label] = total
        return found

    def unmask(self, sent: Sequence[int]) -> Opening:
        """Of those who have sent shares of their self-masks, of the others one of their keys; never both, and once."""
        if why := self._cheated(set(sent)):
            raise FedtailorError(f"secure: {why}; the client says nothing")
        self.said = True
        told = {
            peer: opened(self._secret_with(peer), self._way(peer, self.client), message)
            for peer, message in self.received.items()
        }
        selves: dict[int, dict[str, bytes]] = {}
        keys = {}
        for peer, labels in expected_opening(self.plan, self.received, sent).items():
            if labels is None:
                keys[peer] = told[peer][:SHARE_BYTES]
            else:
                place = {label: number for number, label in enumerate(self.plan.labels(peer), 1)}
                selves[peer] = {label: _share(told[peer], place[label]) for label in labels}
        return Opening(selves, keys)

    def _cheated(self, sent: set[int]) -> str:
        """Why a list of those who have sent is not answered."""
        if self.said:
            return "the server asks twice who has sent"
        if not sent <= set(self.received) or self.client not in sent:
            return "the list of those who have sent names others than this round's, or leaves this client out"
        least = needed(len(self.peers))
        return (
            f"{len(sent)} clients have sent, fewer than {least} of {len(self.peers)}"
            if len(sent) < least
            else ""
        )


def rows_digest(rows: Mapping[str, Words]) -> str:
    """SHA-256 of rows under masks, with the names of their classes."""
    found = hashlib.sha256()
    for label in sorted(rows):
        found.update(f"{label} {len(rows[label])}\n".encode())
        found.update(rows[label].astype("<u4").tobytes())
    return found.hexdigest()


def _share(text: bytes, number: int) -> bytes:
    return text[number * SHARE_BYTES : (number + 1) * SHARE_BYTES]


def pair_mask(private: bytes, public: bytes, plan: Plan, label: str, length: int, first: bool) -> Words:
    """What two clients add in a class: the one with the smaller number the stream, the other its negative."""
    stream = mask(derived(agreed(private, public), "pair"), plan.purpose(label), length)
    return stream if first else (np.uint32(0) - stream)


@dataclass
class Collector:
    """The server in one round: it passes messages on, and adds up what is masked."""

    plan: Plan
    keys: Mapping[int, Keys]

    def sums(
        self,
        masked: Mapping[int, Mapping[str, Words]],
        cohort: Sequence[int],
        openings: Mapping[int, Opening],
    ) -> Sums:
        """Of every class in which enough have sent, the sum of their values, and who these are."""
        least, alive = needed(len(self.keys)), sorted(masked)
        if len(openings) < least:
            raise FedtailorError(
                f"secure: {len(openings)} of {len(self.keys)} clients were there at the end, and {least} are needed to "
                "take off the masks; the round is lost"
            )
        gone = {
            client: self._recovered({n: each.keys[client] for n, each in openings.items()})
            for client in cohort
            if client not in masked
        }
        found = {}
        for label in self.plan.enough(alive):
            senders = [client for client in alive if client in self.plan.classes[label]]
            total = np.zeros_like(masked[senders[0]][label])
            for client in senders:
                own = self._recovered({n: each.selves[client][label] for n, each in openings.items()})
                total = total + masked[client][label] - mask(own, self.plan.purpose(label), len(total))
            for lost in (client for client in self.plan.classes[label] if client in gone):
                for client in senders:  # what they added with the one who is gone
                    total = total - pair_mask(
                        gone[lost], self.keys[client].masking, self.plan, label, len(total), client < lost
                    )
            found[label] = (total, senders)
        return found

    def _recovered(self, told: Mapping[int, bytes]) -> bytes:
        return secret_of({teller + 1: share for teller, share in told.items()}, needed(len(self.keys)))
