"""Who is there: the clients of a real fleet as they join, with what each says of its device.

In a simulation the server knows every client from the start. Here a client joins with the number of its examples and
the limits of its device, may say something else in the next round, leaves and comes back; the population of a round is
who is there when it begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet.fleet import Fleet, Population
from fedtailor.seeds import Seeds

MOST_EXAMPLES = 10**12
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,63}")


@dataclass(frozen=True)
class Profile:
    """What a client says of itself; where it names no tier and no limits, the server's fleet decides."""

    name: str
    examples: int
    tests: int = 0  # examples of its own that it evaluates on
    tier: str | None = None
    budget: Budget | None = None
    kept: int = 0  # examples that it keeps back to choose by

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and NAME.fullmatch(self.name) is not None
        require(named, "name", self.name, "up to 64 letters, digits and . _ @ : + -")
        for field in ("examples", "tests", "kept"):
            count, least = getattr(self, field), 1 if field == "examples" else 0
            fine = isinstance(count, int) and not isinstance(count, bool) and least <= count <= MOST_EXAMPLES
            require(fine, field, count, f"a whole number from {least}")
        require(self.tier is None or isinstance(self.tier, str), "tier", self.tier, "the name of a tier")

    def value(self) -> dict[str, Any]:
        """Plain values, for a message."""
        limits = {} if self.budget is None else {name: str(x) for name, x in self.budget.limits.items()}
        return {
            "name": self.name, "examples": self.examples, "tests": self.tests, "kept": self.kept, "tier": self.tier,
            "limits": limits,
        }  # fmt: skip

    @classmethod
    def of(cls, value: object) -> Profile:
        """The inverse, of what another machine sent: anything else is refused by the name of the field."""
        require(isinstance(value, Mapping), "profile", value, "a table")
        assert isinstance(value, Mapping)
        known = {"name", "examples", "tests", "kept", "tier", "limits"}
        for key in value:
            if key not in known:
                raise unknown("field of a profile", key, known)
        limits = value.get("limits") or {}
        texts = isinstance(limits, Mapping) and all(isinstance(each, str) for each in limits.values())
        require(texts, "limits", limits, "a table of limits such as {macs = '5M'}")
        for name in limits:
            if name not in LIMITS:
                raise unknown("limit", name, LIMITS)
        budget = Budget(**limits) if limits else None
        counts = {field: value.get(field, 0) for field in ("examples", "tests", "kept")}
        return cls(value.get("name", ""), tier=value.get("tier"), budget=budget, **counts)


LIMITS = ("macs", "params", "bytes", "memory", "step_time")  # what a device may say of itself


# The number of the tier that a device with limits of its own is counted with.
TierFor = Callable[[Budget], int]


def _first(_budget: Budget) -> int:
    return 0


class Roster:
    """All clients that ever joined, by their numbers, and who of them is there now.

    ``look`` is called when a round begins, to find out who has come and gone. A number belongs to a name for the whole
    run, whatever order clients come back in after it was interrupted: ``names`` is saved with the run. Where clients
    hold parts of one split that the server knows the size of (``split``), their numbers are those of the parts.
    ``tier_for`` says which tier a device is counted with that names limits alone.
    """

    def __init__(
        self,
        names: Mapping[str, int] | None = None,
        split: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.numbers: dict[str, int] = dict(names or {})
        self.split = split
        self.look = look
        self.tier_for: TierFor = _first
        self.profiles: dict[int, Profile] = {}
        self.present: set[int] = set()
        self.fresh = not self.numbers  # whether nobody has a number from before

    def join(self, profile: Profile) -> int:
        """Take a client in, or note what it says now; its number."""
        if self.split is not None:
            part = profile.name.isdecimal() and int(profile.name) < self.split
            require(part, "name", profile.name, f"the number of a part, 0 to {self.split - 1}")
        number = (
            int(profile.name) if self.split is not None else self.numbers.get(profile.name, len(self.numbers))
        )
        self.numbers[profile.name] = number
        self.profiles[number] = profile
        self.present.add(number)
        return number

    def sort(self) -> dict[int, int]:
        """Number those who have joined a fresh run by their names, so that who was faster decides nothing; old to new.

        After that numbers stay as they are: who comes later has the next one, and a run that is resumed keeps all.
        """
        if not self.fresh or self.split is not None:
            return {number: number for number in self.numbers.values()}
        self.fresh = False
        moved = {self.numbers[name]: place for place, name in enumerate(sorted(self.numbers))}
        self.numbers = {name: moved[number] for name, number in self.numbers.items()}
        self.profiles = {moved[number]: profile for number, profile in self.profiles.items()}
        self.present = {moved[number] for number in self.present}
        return moved

    def leave(self, number: int) -> None:
        """A client that cannot be asked at the moment; what it said of itself is kept."""
        self.present.discard(number)

    def __len__(self) -> int:
        return self.split if self.split is not None else len(self.numbers)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many training examples each client holds; 0 where it has not said so yet."""
        held = (self.profiles[n].examples if n in self.profiles else 0 for n in range(len(self)))
        return np.fromiter(held, np.int64, len(self))

    def name(self, number: int) -> str:
        """How users call a client, also one that has not come back yet."""
        if number in self.profiles:
            return self.profiles[number].name
        return next((name for name, each in self.numbers.items() if each == number), str(number))

    def tests(self, number: int) -> int:
        """How many examples of its own a client evaluates on."""
        return self.profiles[number].tests if number in self.profiles else 0

    def kept(self, number: int) -> int:
        """How many examples a client keeps back to choose by."""
        return self.profiles[number].kept if number in self.profiles else 0

    def counts(self, fleet: Fleet) -> list[int]:
        """How many of those who are there belong to each tier now."""
        tiers = [client.tier for client in self.population(fleet, 0, Seeds(0))]
        return [tiers.count(tier.name) for tier in fleet.tiers]

    def population(self, fleet: Fleet, round: int, seeds: Seeds) -> Population:
        """Who is there, with the tiers and budgets of this round."""
        self.look()
        if self.split is not None:
            drawn = fleet.capacity(self.sizes, round, seeds)
            tiers, able = drawn.tiers.copy(), range(len(self)) if drawn.able is None else drawn.able.tolist()
            there, macs = self.present & set(able), drawn.macs
        else:
            tiers, there, macs = np.zeros(len(self), np.int32), self.present, None
        budgets = {}
        for number in sorted(there):
            profile = self.profiles[number]
            if self.split is None or profile.tier is not None or profile.budget is not None:
                tiers[number], budgets[number] = placed(profile, fleet, self.tier_for)
        everyone = np.array(sorted(there), dtype=np.int64)
        return Population(fleet, self.sizes, tiers, macs, everyone, budgets)


def placed(profile: Profile, fleet: Fleet, tier_for: TierFor = _first) -> tuple[int, Budget]:
    """The tier of a client, by its number in the fleet, and its budget: its own limits, or those of its tier."""
    names = [tier.name for tier in fleet.tiers]
    if profile.tier is not None and profile.tier not in names:
        raise unknown("tier", profile.tier, names, hint=f" (of client {profile.name})")
    if profile.tier is None and profile.budget is None and len(names) > 1:
        raise FedtailorError(
            f"client {profile.name} names neither a tier nor a limit: expected one of the tiers "
            f"{', '.join(names)}, or limits such as macs = '5M'"
        )
    if profile.tier is not None:
        number = names.index(profile.tier)
    else:
        number = 0 if profile.budget is None else tier_for(profile.budget)
    return number, profile.budget or fleet.tiers[number].budget
