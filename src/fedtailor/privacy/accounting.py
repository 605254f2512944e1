"""What rounds cost in epsilon: Google's ``dp-accounting`` does the sums, here is what it is told.

The accountant works with Rényi divergences (``RdpAccountant``): an upper bound, and a fast one.

| sampling | neighbours differ by             | a round is                                                        |
|----------|----------------------------------|-------------------------------------------------------------------|
| poisson  | a client that is there or is not | a Gaussian mechanism on a Poisson sample of rate q                |
| fixed    | a client replaced by another     | one on n of N without replacement, of half the multiplier: 2 clip |
| known    | a client that sends nothing      | a Gaussian mechanism; who takes part hides nobody                 |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.privacy.settings import Sampling

MOST_ROUNDS = 10_000_000
LEAST, MOST = 0.01, 10_000.0  # multipliers that are looked at


@dataclass(frozen=True)
class Mechanism:
    """What one round does to one tier, as an accountant sees it."""

    sampling: Sampling
    clients: int  # that may be drawn
    asked: int  # so many are, or are expected
    multiplier: float  # deviation of the noise over the most that one client changes

    @property
    def rate(self) -> float:
        """The probability that a client takes part in a round."""
        return self.asked / self.clients


def epsilon(rounds: Mapping[Mechanism, int], delta: float) -> float:
    """What so many rounds of each kind cost together."""
    return _epsilon(tuple(sorted(rounds.items(), key=repr)), delta) if any(rounds.values()) else 0.0


@lru_cache(maxsize=4096)
def _epsilon(rounds: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    if any(count and not each.multiplier for each, count in rounds):
        return math.inf
    with _quiet():
        library, accountant = _library(), _accountant(rounds[0][0].sampling)
        for mechanism, count in rounds:
            accountant.compose(library.SelfComposedDpEvent(_event(mechanism), count))
        return float(accountant.get_epsilon(delta))


def multiplier_for(target: float, mechanism: Mechanism, rounds: int, delta: float) -> float:
    """The least multiplier, to four digits, with which so many rounds cost no more than ``target``."""
    library = _library()

    def event(multiplier: float) -> Any:
        return library.SelfComposedDpEvent(_event(replace(mechanism, multiplier=multiplier)), rounds)

    if epsilon({replace(mechanism, multiplier=LEAST): rounds}, delta) <= target:
        return LEAST
    with _quiet():
        bracket = library.LowerEndpointAndGuess(LEAST, 1.0)
        found = library.calibrate_dp_mechanism(
            lambda: _accountant(mechanism.sampling), event, target, delta, bracket
        )
    if found > MOST:
        raise FedtailorError(
            f"privacy.epsilon = {target:g}: {rounds} rounds below it at privacy.delta = {delta:g} would need noise of "
            f"{found:.0f} times the clip; expected a larger epsilon, or fewer rounds"
        )
    return float(math.ceil(found * 1e4) / 1e4)


def rounds_within(target: float, mechanism: Mechanism, delta: float) -> int:
    """How many rounds cost no more than ``target``."""
    low, high = 0, 1
    while high < MOST_ROUNDS and epsilon({mechanism: high}, delta) <= target:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon({mechanism: middle}, delta) <= target else (low, middle)
    return low


def _event(mechanism: Mechanism) -> Any:
    library, rate, multiplier = _library(), mechanism.rate, mechanism.multiplier
    if mechanism.sampling == "fixed":
        gaussian = library.GaussianDpEvent(multiplier / 2)
        sampled = library.SampledWithoutReplacementDpEvent(mechanism.clients, mechanism.asked, gaussian)
        return sampled if rate < 1 else gaussian
    gaussian = library.GaussianDpEvent(multiplier)
    sampled = mechanism.sampling == "poisson" and rate < 1
    return library.PoissonSampledDpEvent(rate, gaussian) if sampled else gaussian


def _accountant(sampling: Sampling) -> Any:
    library = _library()
    relations = library.NeighboringRelation
    relation = relations.REPLACE_ONE if sampling == "fixed" else relations.ADD_OR_REMOVE_ONE
    return library.rdp.RdpAccountant(neighboring_relation=relation)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise FedtailorError(
            "[privacy] needs the package dp-accounting: pip install 'fedtailor[privacy]'"
        ) from error
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """It warns of orders that it leaves out; the bound without them is an upper bound all the same."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
