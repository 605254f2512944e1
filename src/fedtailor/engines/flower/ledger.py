"""Who is there, and what went to and fro: what people want to see of a fleet while a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fedtailor.elasticity.costing.budget import limit_text
from fedtailor.engines.flower.post import Parcel
from fedtailor.fleet.roster import Roster

COUNTED = ("asked", "answered", "down", "up")


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Ledger:
    """Messages and bytes of each client and of each tier; a message to several clients is shared out among them."""

    clients: dict[int, Counter[str]] = field(default_factory=dict)
    tiers: dict[str, Counter[str]] = field(default_factory=dict)
    tier_of: dict[int, str] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)  # when a client last answered
    clock: Callable[[], datetime] = _now

    def sent(self, clients: Sequence[int], parcel: Parcel) -> None:
        """A message that went out."""
        self._count(clients, "asked", "down", parcel.nbytes)

    def heard(self, clients: Sequence[int], parcel: Parcel) -> None:
        """A message that came back."""
        self._count(clients, "answered", "up", parcel.nbytes)
        self.last |= dict.fromkeys(clients, self.clock().isoformat(timespec="seconds"))

    def _count(self, clients: Sequence[int], times: str, way: str, nbytes: int) -> None:
        for place, client in enumerate(clients):
            share = nbytes * (place + 1) // len(clients) - nbytes * place // len(clients)
            spent = {times: 1, way: share}
            self.clients.setdefault(client, Counter()).update(spent)
            self.tiers.setdefault(self.tier_of.get(client, ""), Counter()).update(spent)

    def value(self, roster: Roster, homes: Mapping[int, int], refused: Mapping[int, str]) -> dict[str, Any]:
        """Everything as plain values, for a file."""
        listed = [self._client(number, roster, homes) for number in sorted(roster.numbers.values())]
        return {
            "when": self.clock().isoformat(timespec="seconds"),
            "clients": listed,
            "tiers": {tier: {name: spent[name] for name in COUNTED} for tier, spent in self.tiers.items()},
            "refused": {str(node): reason for node, reason in refused.items()},
        }

    def _client(self, number: int, roster: Roster, homes: Mapping[int, int]) -> dict[str, Any]:
        profile, spent = roster.profiles.get(number), self.clients.get(number, Counter())
        limits = {} if profile is None or profile.budget is None else profile.budget.limits
        return {
            "client": number,
            "name": roster.name(number),
            "connected": number in homes,
            "tier": self.tier_of.get(number) or (profile.tier if profile else None) or "",
            "limits": ", ".join(f"{name} {limit_text(name, limit)}" for name, limit in limits.items()),
            "examples": 0 if profile is None else profile.examples,
            "last_answer": self.last.get(number),
            **{name: spent[name] for name in COUNTED},
        }

    def go_on(self, value: Mapping[str, Any]) -> None:
        """Count on from what an interrupted run had spent."""
        for row in value.get("clients", ()):
            self.clients[row["client"]] = Counter({name: row[name] for name in COUNTED})
            self.tier_of[row["client"]] = row["tier"]
            if row["last_answer"]:
                self.last[row["client"]] = row["last_answer"]
        self.tiers = {tier: Counter(spent) for tier, spent in value.get("tiers", {}).items()}
