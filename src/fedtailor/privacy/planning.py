"""What a private run would cost every tier, and which noise a target needs: before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtailor.privacy.sums import Ground
from fedtailor.privacy.terms import Terms

USUAL_TARGETS = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class TierPlan:
    """One tier: what its clients spend, and what the noise does to the weights of its ring."""

    tier: str
    clients: int
    expected: float  # in a round
    noise: float  # of its ring, over the clip
    multiplier: float  # over the most that one of its clients can change
    epsilon: float  # of the whole run
    per_weight: (
        float | None
    )  # deviation of a weight of its ring, in one round; None: it has no ring of its own


@dataclass(frozen=True)
class Need:
    """A target, the noise that it needs in every ring, and how many rounds the noise of the settings allows."""

    epsilon: float
    noise: float
    rounds: int | None  # None: the settings have no noise


def tier_plans(terms: Terms, rounds: int, ground: Mapping[str, Ground]) -> list[TierPlan]:
    """All tiers, the smallest first."""
    spent = terms.epsilons(rounds)
    return [
        TierPlan(
            name, terms.counts[number], terms.expected(number), terms.noises[number], terms.multiplier(number),
            spent[name], _per_weight(terms, number, ground),
        )
        for number, name in enumerate(terms.tiers)
    ]  # fmt: skip


def _per_weight(terms: Terms, ring: int, ground: Mapping[str, Ground]) -> float | None:
    """Where fewest clients are expected."""
    fewest = [
        each.expected[each.ring == ring].min().item() for each in ground.values() if (each.ring == ring).any()
    ]
    return terms.deviation(ring) / min(fewest) if fewest else None


def needs(terms: Terms, rounds: int, targets: Sequence[float]) -> list[Need]:
    """Which noise each target needs for so many rounds."""
    noisy = all(noise > 0 for noise in terms.noises)
    return [
        Need(target, terms.noise_for(target, rounds), terms.rounds_for(target) if noisy else None)
        for target in targets
        if math.isfinite(target)
    ]
