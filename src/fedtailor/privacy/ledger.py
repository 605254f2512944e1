"""The ledger: what was spent, written and synced before the noise that it pays for is drawn.

A round is paid for with a *mark* of the sums that it releases, made with the run's secret key. The noise follows from
key and mark. So a round that is repeated after a crash, with the same answers, is the same release: the same noise, and
nothing new to pay. With other answers it has another mark, other noise, and is paid for again. Equal noise on different
sums, which would cancel, cannot happen.

privacy.jsonl   a line for each release; never cut, also where a run goes on from an earlier round
privacy.key     32 bytes from the system's entropy; removed at the end of the run. Lost, another takes its place:
                rounds that are repeated then count again
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.privacy.accounting import Mechanism, epsilon
from fedtailor.privacy.settings import SAMPLINGS
from fedtailor.privacy.terms import Terms
from fedtailor.storage.files import append_file, remove_file, replace_file, sync_file, sync_folder
from fedtailor.storage.rows import as_line, parsed

LEDGER, KEY = "privacy.jsonl", "privacy.key"
KEY_BYTES = 32


@dataclass(frozen=True)
class Spending:
    """One release, as it was paid for; whoever takes part in which round is not in it."""

    round: int
    mark: str
    mechanisms: Mapping[str, Mechanism]  # of every tier

    def as_row(self, number: int) -> dict[str, Any]:
        """Its line; lines are numbered, so that none can be missing."""
        any_tier = next(iter(self.mechanisms.values()))
        return {
            "release": number,
            "round": self.round,
            "mark": self.mark,
            "sampling": any_tier.sampling,
            "clients": any_tier.clients,
            "asked": any_tier.asked,
            "multipliers": {tier: each.multiplier for tier, each in self.mechanisms.items()},
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Spending:
        """The inverse; ``ValueError`` where a line says something else."""
        multipliers = row.get("multipliers")
        whole = all(type(row.get(name)) is int for name in ("round", "clients", "asked"))
        if row.get("sampling") not in SAMPLINGS or not whole or not isinstance(row.get("mark"), str):
            raise ValueError("no release")
        if not isinstance(multipliers, dict) or not multipliers:
            raise ValueError("no multipliers")
        if not all(isinstance(each, int | float) for each in multipliers.values()):
            raise ValueError("no multipliers")
        sampling, clients, asked = row["sampling"], row["clients"], row["asked"]
        made = {tier: Mechanism(sampling, clients, asked, float(z)) for tier, z in multipliers.items()}
        return cls(row["round"], row["mark"], made)


class Ledger:
    """What was spent so far, in memory and, of a run that is saved, in its folder."""

    def __init__(self, terms: Terms, limit: float, folder: Path | None = None, key: bytes = b"") -> None:
        """``limit``: the epsilon that no tier may exceed; 0: none. A ``key`` that is given makes a run repeatable."""
        self.terms, self.limit, self.folder = terms, limit, folder
        self.spendings: list[Spending] = [] if folder is None else _read(folder / LEDGER, self._next())
        self.paid = 0  # how many of them the last round that was paid for came to
        self._key = key or (_kept_key(folder / KEY) if folder is not None else secrets.token_bytes(KEY_BYTES))

    def check_covers(self, rounds: int) -> None:
        """Refuse to go on where rounds that were released are not in the ledger."""
        there = {each.round for each in self.spendings}
        missing = [round for round in range(rounds) if round not in there]
        if missing:
            raise CorruptError(
                f"{LEDGER} is damaged: round {missing[0] + 1} was released and is not in it; what was spent is unknown"
            )

    def key_for(self, purpose: str) -> bytes:
        """A key for one purpose."""
        return hmac.new(self._key, purpose.encode(), hashlib.sha256).digest()

    def pay(self, round: int, digest: bytes) -> str:
        """Pay for the release of sums with this digest, and give their mark; refused where that is beyond the limit."""
        text = round.to_bytes(8, "little") + digest
        mark = hmac.new(self.key_for("mark"), text, hashlib.sha256).hexdigest()
        for number, each in enumerate(self.spendings):
            if (each.round, each.mark) == (round, mark):
                self.paid = number + 1
                return mark
        spending = Spending(round, mark, self._next())
        self._refuse_beyond_limit(spending)
        if self.folder is not None:
            file = self.folder / LEDGER
            is_new = not file.exists()
            append_file(file, as_line(spending.as_row(len(self.spendings))))
            sync_file(file)
            if is_new:
                sync_folder(self.folder)
        self.spendings.append(spending)
        self.paid = len(self.spendings)
        return mark

    def _next(self) -> dict[str, Mechanism]:
        return {tier: self.terms.mechanism(number) for number, tier in enumerate(self.terms.tiers)}

    def _refuse_beyond_limit(self, spending: Spending) -> None:
        if not self.limit:
            return
        tier, spent = max(
            self._epsilons([*self.spendings, spending]).items(), key=lambda item: (item[1], item[0])
        )
        if spent > self.limit:
            raise FedtailorError(
                f"privacy.epsilon = {self.limit:g} is used up: {len(self.spendings)} releases are paid for, repeated "
                f"rounds with other answers among them, and one more would cost tier {tier!r} {spent:.4g} in all. "
                f"The model is that of round {spending.round}"
            )

    def epsilons(self) -> dict[str, float]:
        """What every tier has spent, up to the round that was paid for last."""
        return self._epsilons(self.spendings[: self.paid])

    def _epsilons(self, spendings: Sequence[Spending]) -> dict[str, float]:
        found = {}
        for tier in self.terms.tiers:
            spent = Counter(each.mechanisms.get(tier) or _dearest(each) for each in spendings)
            found[tier] = epsilon(spent, self.terms.delta)
        return found

    def close(self) -> None:
        """The run has come to its end: without its key nobody can work out the noise again."""
        if self.folder is not None:
            remove_file(self.folder / KEY)


def _dearest(spending: Spending) -> Mechanism:
    """Of a tier that had another name then: what cost most."""
    return min(spending.mechanisms.values(), key=lambda each: each.multiplier)


def _read(file: Path, usual: Mapping[str, Mechanism]) -> list[Spending]:
    """All releases. A last line that a crash has cut short counts as one, and is completed."""
    lines = file.read_bytes().split(b"\n") if file.is_file() else [b""]
    found: list[Spending] = []
    for number, line in enumerate(lines[:-1]):
        row = parsed(line.decode("utf-8", "replace"))
        try:
            if row.get("release") != number:
                raise ValueError(f"expected release {number}")
            found.append(Spending.of_row(row))
        except ValueError as error:
            raise CorruptError(
                f"{file} is damaged: line {number + 1}: {error}; what was spent is unknown"
            ) from error
    if lines[-1]:
        found.append(Spending(-1, "cut short", usual))
        whole = [as_line(each.as_row(number)) for number, each in enumerate(found)]
        replace_file(file, whole)
    return found


def _kept_key(file: Path) -> bytes:
    if file.is_file() and file.stat().st_size == KEY_BYTES:
        return file.read_bytes()
    replace_file(file, [secrets.token_bytes(KEY_BYTES)])
    return file.read_bytes()


def seeded_key(seed: int) -> bytes:
    """A key that anyone can work out: for runs that are to be repeated, and hide nothing."""
    return hashlib.sha256(f"fedtailor privacy {seed}".encode()).digest()
