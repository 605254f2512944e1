"""The protocol of one round, class by class (Bonawitz et al., "Practical Secure Aggregation", CCS 2017).

    advertise   client → server   public keys                  the server sends all of them to all
    share       client → clients  sealed shares of its two secrets, through the server. The cohort is fixed from here on
    mask        client → server   y = q + G(b_i) + sum_{j > i} G(s_ij) - sum_{j < i} G(s_ij)   (mod 2^32), each class
    unmask      client → server   of each peer one share: of b_j if it has sent, of its key if it has not

A *class* is the coordinates that the same tiers hold; its members are the clients of these tiers, and masks are agreed
among them alone. What the server is left with is the sum over those members that sent, and nothing of a class in which
these are fewer than the threshold.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedtailor.errors import FedtailorError
from fedtailor.secure.shamir import SHARE_BYTES, secret_of, shares_of
from fedtailor.secure.streams import Pair, Words, agreed, derived, mask, opened, sealed

Classes = Mapping[str, Sequence[int]]  # name of a class -> its members, the clients of its tiers


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


@dataclass(frozen=True)
class Keys:
    """The public keys of a client: for sealing shares, and for masks."""

    sealing: bytes
    masking: bytes


@dataclass(frozen=True)
class Opening:
    """What a client says at the end: of each peer one share."""

    selves: Mapping[int, bytes]  # of the self-masks of those who have sent
    keys: Mapping[int, bytes]  # of the keys of those who have not


@dataclass
class Participant:
    """One client in one round; its secrets are new, and are gone with it."""

    client: int
    plan: Plan
    _sealing: Pair = field(default_factory=Pair.new, repr=False)
    _masking: Pair = field(default_factory=Pair.new, repr=False)
    _own: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _peers: Mapping[int, Keys] = field(default_factory=dict, repr=False)
    _received: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    _said: bool = False

    def advertise(self) -> Keys:
        """Its public keys."""
        return Keys(self._sealing.public, self._masking.public)

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """For every peer, sealed, a share of its masking key and one of its self-mask."""
        fresh = {each.masking for each in keys.values()} | {each.sealing for each in keys.values()}
        if self.client not in keys or len(fresh) != 2 * len(keys) or not set(keys) <= set(self.plan.cohort):
            raise FedtailorError(
                "secure: the list of keys is not that of this round; the client takes no part"
            )
        self._peers = dict(keys)
        holders, least = [client + 1 for client in sorted(keys)], needed(len(keys))
        of_key, of_self = (shares_of(each, least, holders) for each in (self._masking.private, self._own))
        return {
            peer: sealed(
                self._secret_with(peer), self._way(self.client, peer), of_key[peer + 1] + of_self[peer + 1]
            )
            for peer in keys
        }

    def _secret_with(self, peer: int) -> bytes:
        return agreed(self._sealing.private, self._peers[peer].sealing)

    def _way(self, sender: int, receiver: int) -> str:
        return f"{self.plan.name} {sender} to {receiver}"

    def masked(self, received: Mapping[int, bytes], values: Mapping[str, Words]) -> dict[str, Words]:
        """Its values of every class under masks; ``received`` are the shares of the cohort, which is fixed by them."""
        if not set(received) <= set(self._peers) or len(received) < needed(len(self._peers)):
            raise FedtailorError("secure: too few clients have shared their keys; the client takes no part")
        self._received = dict(received)
        found = {}
        for label, words in values.items():
            members = [each for each in self.plan.classes[label] if each in received]
            if len(members) < self.plan.threshold:
                raise FedtailorError(
                    f"secure: {len(members)} clients in class {label}, fewer than secure.threshold = "
                    f"{self.plan.threshold}; the client does not send it"
                )
            total = words + mask(self._own, self.plan.purpose(label), len(words))
            for peer in members:
                if peer != self.client:
                    total = total + pair_mask(self._masking.private, self._peers[peer].masking, self.plan, label,
                                              len(words), self.client < peer)  # fmt: skip
            found[label] = total
        return found

    def unmask(self, sent: Sequence[int]) -> Opening:
        """Of those who have sent a share of their self-masks, of the others one of their keys; never both, and once."""
        alive, cohort = set(sent), set(self._received)
        if (
            self._said
            or not alive <= cohort
            or self.client not in alive
            or len(alive) < needed(len(self._peers))
        ):
            raise FedtailorError(
                "secure: the list of those who have sent is refused; the client says nothing"
            )
        self._said = True
        both = {
            peer: opened(self._secret_with(peer), self._way(peer, self.client), message)
            for peer, message in self._received.items()
        }
        return Opening(
            {peer: text[SHARE_BYTES:] for peer, text in both.items() if peer in alive},
            {peer: text[:SHARE_BYTES] for peer, text in both.items() if peer not in alive},
        )


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
    ) -> dict[str, tuple[Words, list[int]]]:
        """Of every class in which enough have sent, the sum of their values, and who these are."""
        least, alive = needed(len(self.keys)), sorted(masked)
        if len(openings) < least:
            raise FedtailorError(
                f"secure: {len(openings)} of {len(self.keys)} clients were there at the end, and {least} are needed to "
                "take off the masks; the round is lost"
            )
        selves = {client: self._recovered(openings, client, "selves") for client in alive}
        gone = {
            client: self._recovered(openings, client, "keys") for client in cohort if client not in masked
        }
        found = {}
        for label, members in self.plan.classes.items():
            senders = [client for client in alive if label in masked[client]]
            if len(senders) < self.plan.threshold:
                continue
            total = np.zeros_like(masked[senders[0]][label])
            for client in senders:
                total = (
                    total + masked[client][label] - mask(selves[client], self.plan.purpose(label), len(total))
                )
            for lost in (client for client in members if client in gone):
                for client in senders:  # what they added with the one who is gone
                    total = total - pair_mask(
                        gone[lost], self.keys[client].masking, self.plan, label, len(total), client < lost
                    )
            found[label] = (total, senders)
        return found

    def _recovered(self, openings: Mapping[int, Opening], client: int, kind: str) -> bytes:
        told = {
            teller + 1: getattr(opening, kind)[client]
            for teller, opening in openings.items()
            if client in getattr(opening, kind)
        }
        return secret_of(told, needed(len(self.keys)))
