"""The settings of [privacy] for one fleet: how much noise each ring gets, and what a run costs each tier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedtailor.errors import FedtailorError, require
from fedtailor.privacy.accounting import Mechanism, epsilon, multiplier_for, rounds_within
from fedtailor.privacy.settings import PrivacySettings, Sampling, by_ring


@dataclass(frozen=True)
class Terms:
    """What a run adds and pays. Tiers, the smallest first, and the ring of each: clip, noise, clients.

    A client of tier t holds coordinates of the rings of tiers 1 to t and of no others, because a ring is named by the
    smallest tier that holds it. With z_k, the noise of ring k over its clip, its own multiplier is

        whole update clipped to C:   z = min over k <= t of z_k       (sum over k of (c_k / (z_k C))^2 <= 1 / z^2)
        every ring clipped to C_k:   z = (sum over k <= t of z_k^-2)^(-1/2)
    """

    tiers: tuple[str, ...]
    counts: tuple[int, ...]  # clients of each tier
    asked: int  # clients_per_round
    sampling: Sampling
    delta: float
    clips: tuple[float, ...]  # of each ring; infinite: not clipped
    noises: tuple[float, ...]  # of each ring, over its clip
    whole: bool  # whether the whole update is clipped, and not each ring

    @classmethod
    def of(
        cls, settings: PrivacySettings, tiers: Sequence[str], counts: Sequence[int], asked: int, rounds: int
    ) -> Terms:
        """As the settings say; noise that they leave open is as much as their epsilon needs."""
        whole = not isinstance(settings.clip, dict)
        clips = tuple(each or math.inf for each in by_ring("clip", settings.clip, tiers))
        noises = tuple(by_ring("noise", settings.noise, tiers))
        terms = cls(
            tuple(tiers), tuple(counts), asked, settings.sampling, settings.delta, clips, noises, whole
        )
        clients = sum(counts)
        require(
            not settings.hides or settings.delta < 1 / clients,
            "privacy.delta", settings.delta, f"below 1 in the number of clients, 1 / {clients}",
        )  # fmt: skip
        if settings.epsilon and not settings.noise:
            return terms.with_noise(terms.noise_for(settings.epsilon, rounds))
        return terms

    def with_noise(self, noise: float) -> Terms:
        """The same with this noise in every ring."""
        return Terms(
            self.tiers, self.counts, self.asked, self.sampling, self.delta, self.clips,
            (noise,) * len(self.tiers), self.whole,
        )  # fmt: skip

    @property
    def rate(self) -> float:
        """The probability that a client takes part in a round."""
        return self.asked / sum(self.counts)

    def expected(self, tier: int) -> float:
        """How many clients of a tier are expected in a round: the public number that sums are divided by."""
        return self.asked * self.counts[tier] / sum(self.counts)

    def deviation(self, ring: int) -> float:
        """Of the noise that every coordinate of a ring gets, in the sum over clients."""
        return self.noises[ring] * self.clips[ring] if self.noises[ring] else 0.0

    def multiplier(self, tier: int) -> float:
        """The noise over the most that one client of a tier can change."""
        held = self.noises[: tier + 1]
        if not all(held):
            return 0.0
        return min(held) if self.whole else math.fsum(noise**-2 for noise in held) ** -0.5

    def mechanism(self, tier: int) -> Mechanism:
        """What a round does to a tier."""
        return Mechanism(self.sampling, sum(self.counts), self.asked, self.multiplier(tier))

    def epsilons(self, rounds: int) -> dict[str, float]:
        """What so many rounds cost every tier."""
        numbers = range(len(self.tiers))
        return {self.tiers[tier]: epsilon({self.mechanism(tier): rounds}, self.delta) for tier in numbers}

    def noise_for(self, target: float, rounds: int) -> float:
        """The noise, the same in every ring, with which no tier spends more than ``target``: the last has the most."""
        last = len(self.tiers) - 1
        factor = self.with_noise(1.0).multiplier(last)
        needed = multiplier_for(target, self.mechanism(last), rounds, self.delta)
        return math.ceil(needed / factor * 1e4 - 1e-9) / 1e4

    def rounds_for(self, target: float) -> int:
        """How many rounds cost no tier more than ``target``."""
        return min(rounds_within(target, self.mechanism(tier), self.delta) for tier in range(len(self.tiers)))

    def refuse_beyond(self, target: float, rounds: int) -> None:
        """The error for a plan that cannot be met, with what would meet it."""
        tier, spent = max(self.epsilons(rounds).items(), key=lambda item: item[1])
        if not target or spent <= target:
            return
        fewer, noise = self.rounds_for(target), self.noise_for(target, rounds)
        ways = [f"privacy.noise = {noise:g}"] + ([f"rounds = {fewer}"] if fewer else [])
        raise FedtailorError(
            f"privacy.epsilon = {target:g}: {rounds} rounds with privacy.noise = {_shown(self.noises)} cost tier "
            f"{tier!r} {spent:.3g}; expected {' or '.join(ways)}"
        )


def _shown(noises: Sequence[float]) -> str:
    several = len(Counter(noises)) > 1
    return ", ".join(f"{each:g}" for each in noises) if several else f"{noises[0]:g}"
