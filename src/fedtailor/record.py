"""What one round leaves behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    round: int
    value: float
    since: int = 0  # evaluations after it that were not better


def less_is_better(metric: str) -> bool:
    """Whether a metric of this name should be small."""
    return any(word in metric.lower() for word in ("loss", "error", "perplexity"))
