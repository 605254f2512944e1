"""The messages of the protocol, and a participant between two of them, as plain values: numbers as keys, bytes as text.

What another machine sent is read strictly: lengths, and who speaks of whom. Anything else is refused.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fedtailor.errors import FedtailorError
from fedtailor.secure.protocol import Keys, Opening, Participant, Plan, expected_opening
from fedtailor.secure.shamir import SECRET_BYTES, SHARE_BYTES
from fedtailor.secure.streams import SEAL_BYTES, Pair, check_public

NUMBER = re.compile(r"\d{1,9}")
T = TypeVar("T")
Value = dict[str, Any]


def keys_value(keys: Keys) -> list[str]:
    """Public keys."""
    return [_text(keys.sealing), _text(keys.masking)]


def keys_of(value: object) -> Keys:
    """The inverse."""
    if not isinstance(value, list) or len(value) != 2:
        raise FedtailorError(f"secure: keys = {value!r:.80}: expected two of them")
    sealing, masking = (_bytes(each, SECRET_BYTES, "a key") for each in value)
    check_public(sealing)
    check_public(masking)
    return Keys(sealing, masking)


def texts_value(texts: Mapping[int, bytes]) -> dict[str, str]:
    """Something for, or of, each of several clients."""
    return {str(client): _text(text) for client, text in texts.items()}


def shares_of_sender(value: object, sender: int, plan: Plan, peers: Collection[int]) -> dict[int, bytes]:
    """What a client has sealed, on its way to each of its peers."""
    length = SEAL_BYTES + SHARE_BYTES * (1 + len(plan.labels(sender)))
    found = table_of(value, lambda text: _bytes(text, length, "a sealed share"))
    if found.keys() != set(peers):
        raise FedtailorError("secure: the sealed shares are not for the clients whose keys were sent")
    return found


def texts_of(value: object) -> dict[int, bytes]:
    """The inverse of ``texts_value``, of any lengths."""
    return table_of(value, lambda text: _bytes(text, None, "a sealed share"))


def opening_value(opening: Opening) -> Value:
    """What a client says at the end."""
    selves = {
        str(peer): {label: _text(share) for label, share in own.items()}
        for peer, own in opening.selves.items()
    }
    return {"selves": selves, "keys": texts_value(opening.keys)}


def opening_of(value: object, plan: Plan, cohort: Collection[int], sent: Collection[int]) -> Opening:
    """The inverse; it holds the shares that a client of this round gives, and no others."""
    if not isinstance(value, Mapping):
        raise FedtailorError(f"secure: an opening is a table, and not {value!r:.80}")
    selves = table_of(value.get("selves"), _shares_by_class)
    keys = table_of(value.get("keys"), lambda text: _bytes(text, SHARE_BYTES, "a share"))
    told: dict[int, list[str] | None] = {peer: sorted(own) for peer, own in selves.items()}
    told |= dict.fromkeys(keys)
    if told != expected_opening(plan, cohort, sent) or selves.keys() & keys.keys():
        raise FedtailorError("secure: the opening holds other shares than were asked for")
    return Opening(selves, keys)


def _shares_by_class(value: object) -> dict[str, bytes]:
    if not isinstance(value, Mapping):
        raise FedtailorError(f"secure: shares by class are a table, and not {value!r:.80}")
    return {str(label): _bytes(text, SHARE_BYTES, "a share") for label, text in value.items()}


def participant_value(of: Participant) -> Value:
    """A client's secrets, and how far it has come. For its own disk alone."""
    return {
        "client": of.client,
        "sealing": _text(of.sealing.private),
        "masking": _text(of.masking.private),
        "selves": {label: _text(secret) for label, secret in of.selves.items()},
        "peers": {str(peer): keys_value(keys) for peer, keys in of.peers.items()},
        "received": texts_value(of.received),
    }


def participant_of(value: Mapping[str, Any], plan: Plan) -> Participant:
    """The inverse, of what this machine wrote."""
    return Participant(
        int(value["client"]),
        plan,
        Pair.of(_bytes(value["sealing"], SECRET_BYTES, "a key")),
        Pair.of(_bytes(value["masking"], SECRET_BYTES, "a key")),
        {label: _bytes(secret, SECRET_BYTES, "a secret") for label, secret in value["selves"].items()},
        table_of(value["peers"], keys_of),
        texts_of(value["received"]),
    )


def table_of(value: object, read: Callable[[object], T]) -> dict[int, T]:
    """A table by clients' numbers."""
    if not isinstance(value, Mapping):
        raise FedtailorError(f"secure: expected a table by clients, and not {value!r:.80}")
    if not all(isinstance(key, str) and NUMBER.fullmatch(key) for key in value):
        raise FedtailorError("secure: a table by clients names something that is no client's number")
    return {int(key): read(each) for key, each in value.items()}


def _text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _bytes(value: object, length: int | None, what: str) -> bytes:
    try:
        found = binascii.a2b_base64(value, strict_mode=True) if isinstance(value, str) else None
    except (binascii.Error, ValueError):  # ValueError: letters that are not ASCII
        found = None
    if found is None:
        raise FedtailorError(f"secure: {what} is no text of bytes")
    if length is not None and len(found) != length:
        raise FedtailorError(f"secure: {what} has {len(found)} bytes instead of {length}")
    return found
