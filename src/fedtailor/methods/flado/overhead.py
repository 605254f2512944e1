"""What alignment costs beside the local steps of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtailor.methods.flado.alignment import estimate_macs


@dataclass(frozen=True)
class Round:
    """A client's round, as its cost sees it."""

    steps: int
    batch: int  # examples of an estimate
    drawn: float  # multiply-accumulates of one example in a drawn network, on average
    full: float  # and in the full one
    params: int  # of the full network
    padded: int  # the length of the transform


def alignment_macs(estimator: str, share: float, at: Round) -> float:
    """Multiply-accumulates of a round's alignment, on average over rounds.

    ``steps`` takes the transform once, and two products for each number of a drawn network in every local step.
    """
    if estimator == "steps":
        return at.padded * math.log2(at.padded) + at.steps * 2 * at.params * at.drawn / at.full
    once = estimate_macs(estimator, at.drawn * at.batch, at.full * at.batch, at.padded)
    return share * at.steps * once
