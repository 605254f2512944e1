"""Clients' memories on disk: each is written once, when it changes, and not into every checkpoint.

A sheet is the file of the memories that are new since the checkpoint before, sealed and chained as generations are.
A checkpoint names its last sheet, and the place in the first one from which on memories count.

Memories that were superseded are given up from the old end. Each new sheet looks at the oldest few memories, takes over
those that still count, and the first place moves on. So a round writes a few times what its own clients keep, however
many were ever seen, and all sheets together hold about twice what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedtailor.errors import CorruptError
from fedtailor.storage import generations
from fedtailor.storage.checkpoint import Memories, Memory, newest_rounds
from fedtailor.storage.files import PART, disk_errors, remove_file, sync_folder
from fedtailor.storage.generations import Generation
from fedtailor.storage.wire import decode, encode

SUFFIX = ".sheet"
# Old memories for each new one: with fewer, what is superseded would gather faster than it is given up.
LOOKED_AT = 3
AT_ONCE = 100  # files that one round removes at most: the best round may let go of many together

Address = tuple[int, int]  # a client, and the round in which it kept something


@dataclass(frozen=True)
class Span:
    """The memories of a checkpoint, as its header names them."""

    first: int
    """The round of the oldest sheet that it needs."""
    skipped: int
    """So many memories at the beginning of that sheet count no more."""
    last: int
    """The round of its newest sheet."""
    digest: str
    """What that sheet is sealed with."""

    @classmethod
    def named_in(cls, header: Mapping[str, Any]) -> Span | None:
        """What a generation names; nothing if nobody keeps anything, or all is in the generation, as it once was."""
        found = header.get("memories")
        if found is None:
            return None
        kinds = {"first": int, "skipped": int, "last": int, "digest": str}
        if isinstance(found, dict) and {key: type(value) for key, value in found.items()} == kinds:
            span = cls(**found)
            if min(span.first, span.skipped, span.last) >= 0:
                return span
        raise CorruptError(f"the checkpoint of round {header['round']} names no memories of clients")

    def as_header(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Sheets:
    """All that clients keep and where it is written, as a value."""

    memories: Memories = field(default_factory=dict)
    # Of each sheet, oldest first, its round and what is in it.
    pages: tuple[tuple[int, tuple[Address, ...]], ...] = ()
    skipped: int = 0
    digest: str = ""

    @property
    def span(self) -> Span | None:
        """What a checkpoint names."""
        return Span(self.pages[0][0], self.skipped, self.pages[-1][0], self.digest) if self.pages else None

    def with_memories(self, folder: Path, round: int, memories: Memories) -> Sheets:
        """Write the sheet of a round; none if nobody kept anything since the last one."""
        new = [
            (client, kept_in)
            for client, kept in memories.items()
            if kept is not (before := self.memories.get(client, {}))
            for kept_in in kept
            if kept_in not in before
        ]
        if not new:
            return self
        pages, skipped, moved = self._without_the_oldest(memories, len(new))
        addresses = (*moved, *sorted(new))
        last = self.span
        header = {
            "round": round,
            "parent_round": last.last if last else None,
            "parent": self.digest,
        }
        entries = [[client, kept_in, memories[client][kept_in]] for client, kept_in in addresses]
        _make(folder)
        digest = generations.save(folder, header, encode(entries), SUFFIX)
        return Sheets(memories, (*pages, (round, addresses)), skipped, digest)

    def _without_the_oldest(
        self, memories: Memories, new: int
    ) -> tuple[tuple[tuple[int, tuple[Address, ...]], ...], int, list[Address]]:
        """What is left if old memories are given up, as far as that is due, and those of them that still count."""
        counting = sum(map(len, memories.values()))
        written = new + sum(len(page) for _, page in self.pages) - self.skipped
        number, skipped = 0, self.skipped
        moved: list[Address] = []
        for _ in range(LOOKED_AT * new):
            if written <= 2 * counting or number == len(self.pages):
                break
            client, kept_in = self.pages[number][1][skipped]
            if kept_in in memories.get(client, {}):
                moved.append((client, kept_in))
            else:
                written -= 1
            skipped += 1
            if skipped == len(self.pages[number][1]):
                number, skipped = number + 1, 0
        return self.pages[number:], skipped, moved


def read(folder: Path, span: Span | None, device: torch.device) -> Sheets:
    """What a checkpoint names, from the newest sheet to the oldest."""
    memories: dict[int, dict[int, Memory]] = {}
    pages: list[tuple[int, tuple[Address, ...]]] = []
    for sheet in _sheets(folder, span):
        entries = _entries(sheet, device)
        pages.append((sheet.round, tuple((client, kept_in) for client, kept_in, _ in entries)))
        counting = entries[span.skipped :] if span and sheet.round == span.first else entries
        for client, kept_in, memory in counting:
            memories.setdefault(client, {}).setdefault(kept_in, memory)
    if span is None:
        return Sheets()
    if span.skipped >= len(pages[-1][1]):
        raise CorruptError(f"{_name(folder, span.first)} holds fewer memories than its checkpoint counts")
    whole = {client: newest_rounds(memories[client]) for client in sorted(memories)}
    return Sheets(whole, tuple(reversed(pages)), span.skipped, span.digest)


def check(folder: Path, span: Span | None) -> None:
    """Refuse memories that are damaged, exchanged or gone."""
    for _ in _sheets(folder, span):
        pass


def _sheets(folder: Path, span: Span | None) -> Iterator[Generation]:
    """The sheets of a checkpoint, newest first; each names the one before it and its digest."""
    round, digest = (span.last, span.digest) if span else (None, "")
    while span and round is not None:
        sheet = generations.load(folder, round, SUFFIX)
        if sheet.digest != digest:
            raise CorruptError(f"{_name(folder, round)} is not the one that the checkpoint was saved with")
        yield sheet
        before, digest = sheet.header["parent_round"], sheet.header["parent"]
        if round == span.first:
            return
        if type(before) is not int or not span.first <= before < round:
            raise CorruptError(f"{_name(folder, round)} does not follow from the sheet of round {span.first}")
        round = before


def _entries(sheet: Generation, device: torch.device) -> list[tuple[int, int, Memory]]:
    """Whose memories a sheet holds, of which rounds, and what they are."""
    found = decode(sheet.payload, device)
    fine = isinstance(found, list) and all(
        isinstance(entry, list)
        and len(entry) == 3
        and all(type(count) is int for count in entry[:2])
        and isinstance(entry[2], dict)
        for entry in found
    )
    if not fine:
        raise CorruptError(f"the sheet of round {sheet.round} holds no memories of clients")
    return [(client, kept_in, memory) for client, kept_in, memory in found]


def release(folder: Path, spans: Iterable[Span | None], most: int | None = AT_ONCE) -> None:
    """Remove sheets that no kept checkpoint needs, ``most`` of them (None: all), and what a crash left behind."""
    if not folder.is_dir():
        return
    needed = [(span.first, span.last) for span in spans if span]
    superseded = [
        generations.place_of(folder, round, SUFFIX)
        for round in generations.saved_rounds(folder, SUFFIX)
        if not any(first <= round <= last for first, last in needed)
    ]
    for path in [*superseded[:most], *folder.glob(f"*{PART}")]:
        with disk_errors(path, 0):
            remove_file(path)


def _make(folder: Path) -> None:
    if not folder.is_dir():
        with disk_errors(folder, 0):
            folder.mkdir()
            sync_folder(folder.parent)


def _name(folder: Path, round: int) -> str:
    return generations.place_of(folder, round, SUFFIX).name
