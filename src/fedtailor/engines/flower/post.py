"""The one file that knows Flower's messages: parcels go out over its grid, and parcels come back.

A parcel is a head of plain values and named pieces of bytes. Pieces are Flower arrays whose bytes are our own frames,
so that nothing is parsed by anybody else; equal pieces of different parcels are equal objects, which Flower sends to
the SuperLink once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.storage.wire import DecodeError

HEAD, PIECES, TEXT = "fedtailor", "pieces", "head"
FRAME = "fedtailor-frame"  # how the bytes of an array are to be read
LARGEST_HEAD = 2**24  # bytes
DEEPEST_HEAD = 32  # tables and lists in one another
MARGIN = 60.0  # seconds that a message outlives the wait for it
Head = dict[str, Any]


@dataclass(frozen=True)
class Parcel:
    """What one message carries."""

    head: Head
    pieces: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def text(self) -> bytes:
        """The head as it travels."""
        return json.dumps(self.head, separators=(",", ":")).encode()

    @property
    def nbytes(self) -> int:
        """How much it carries."""
        return len(self.text) + sum(map(len, self.pieces.values()))


@dataclass(frozen=True)
class Failed:
    """A message that was not answered by the app: why, in Flower's words."""

    reason: str


def content_of(parcel: Parcel) -> Any:
    """The content of a Flower message."""
    app = flower()
    arrays = {
        name: app.Array(dtype="uint8", shape=(len(piece),), stype=FRAME, data=piece)
        for name, piece in parcel.pieces.items()
    }
    records = {HEAD: app.ConfigRecord({TEXT: parcel.text}), PIECES: app.ArrayRecord(arrays)}
    return app.RecordDict(records)


def parcel_of(content: Any) -> Parcel:
    """The parcel in the content of a message from another machine; anything else is refused, nothing is executed."""
    records, arrays = content.config_records, content.array_records
    text = records[HEAD].get(TEXT) if HEAD in records else None
    if not isinstance(text, bytes) or len(text) > LARGEST_HEAD or set(arrays) - {PIECES}:
        raise DecodeError("a message of another app, or of another version of fedtailor")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the head of a message is no JSON: {error}") from None
    if not isinstance(head, dict) or _is_deep(head):
        raise DecodeError(f"the head of a message is no table, or nested more than {DEEPEST_HEAD} times")
    pieces = arrays.get(PIECES, {})
    if any(array.stype != FRAME or not isinstance(array.data, bytes) for array in pieces.values()):
        raise DecodeError("a piece of a message is no frame")
    return Parcel(head, {name: array.data for name, array in pieces.items()})


def _is_deep(value: Head) -> bool:
    """Whether tables and lists lie in one another more often than any of ours."""
    level: list[Any] = [value]
    for _ in range(DEEPEST_HEAD):
        inner = (each for table in level for each in (table.values() if isinstance(table, dict) else table))
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)


class Post:
    """Flower's grid, as far as an engine needs it. No call waits for an answer."""

    def __init__(self, grid: Any, patience: float) -> None:
        self.grid, self.patience = grid, patience

    def nodes(self) -> set[int]:
        """Who is connected."""
        return {int(node) for node in self.grid.get_node_ids()}

    def send(self, parcels: Mapping[int, Parcel], kind: str, group: str) -> dict[str, int]:
        """Send a parcel to each node; the number of each message, and who it went to."""
        if not parcels:
            return {}
        app, ttl = flower(), self.patience + MARGIN
        messages = [
            app.Message(content_of(parcel), node, kind, ttl=ttl, group_id=group)
            for node, parcel in parcels.items()
        ]
        numbers = list(self.grid.push_messages(messages))
        if len(numbers) != len(messages):
            raise FedtailorError("the SuperLink did not take the messages of this round: too large for it?")
        return {str(number): node for number, node in zip(numbers, parcels, strict=True) if number}

    def received(self, numbers: Collection[str]) -> Iterator[tuple[str, Parcel | Failed]]:
        """The answers that have arrived, each with the number of the message that it answers; the first to each."""
        if not numbers:
            return
        unanswered = set(numbers)
        for reply in self.grid.pull_messages(list(numbers)):
            number = str(reply.metadata.reply_to_message_id)
            if number not in unanswered:
                continue
            unanswered.remove(number)
            if reply.has_error():
                yield number, Failed(str(reply.error.reason or reply.error.code))
                continue
            try:
                yield number, parcel_of(reply.content)
            except DecodeError as error:
                yield number, Failed(str(error))


def flower() -> Any:
    """``flwr.app``, which is an extra."""
    try:
        import flwr.app
    except ImportError as error:
        raise FedtailorError(
            f'running on Flower needs the extra: pip install "fedtailor[flower]" ({error})'
        ) from error
    return flwr.app
