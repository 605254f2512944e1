"""The record of a round: what was asked and merged, what it cost, what was measured, what the method has to say.

It is made in one place (``server.recording``), written and read by a run folder, shown, tracked and reported from
there. On disk it is one flat row of ``metrics.jsonl``; two parts stand elsewhere: ``coverage``, which may be long, in
``coverage.jsonl``, and ``seconds``, which differ from run to run, in ``events.jsonl``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tiers = Mapping[str, Mapping[str, float]]  # tier -> metric -> value, the smallest device first
Row = dict[str, Any]  # a record as plain values

LOSS = "loss"


@dataclass(frozen=True)
class Cohort:
    """Who was asked, and what became of it; abandoned tries count too."""

    asked: int = 0
    merged: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # reason -> how often, also of measuring
    abandoned: int = 0  # tries without a quorum
    resting: int = 0  # clients that are not asked any more


@dataclass(frozen=True)
class Spent:
    """What some work cost: bytes on the wire, without headers, and multiply-accumulates on clients."""

    bytes_down: int = 0
    bytes_up: int = 0
    macs: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.bytes_down + other.bytes_down, self.bytes_up + other.bytes_up, self.macs + other.macs
        )

    @property
    def bytes(self) -> int:
        """Both ways."""
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class Covered:
    """So many clients sent just these coordinates: ``cut`` as ``cutting.encoding`` writes it, and tags of weights."""

    count: int
    cut: Mapping[str, Any]
    tags: Sequence[str] = ()


@dataclass(frozen=True)
class RoundRecord:
    """All that one round leaves behind for people."""

    round: int
    cohort: Cohort = field(default_factory=Cohort)
    training: Spent = field(default_factory=Spent)
    measuring: Spent = field(default_factory=Spent)  # calibration, and evaluation on clients
    train_loss: float | None = None
    tiers: Tiers | None = None  # of rounds that were evaluated
    best_round: int | None = None  # so far
    deployed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # tier -> cost of a prediction
    reported: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # client -> its own metrics
    method: Mapping[str, Any] = field(default_factory=dict)  # what ``Method.notes`` returned
    coverage: Sequence[Covered] = ()  # equal cuts of merged updates
    seconds: float = 0.0

    @property
    def spent(self) -> Spent:
        """What training and measuring cost together."""
        return self.training + self.measuring

    def as_row(self) -> Row:
        """The flat row of ``metrics.jsonl``: everything but ``coverage`` and ``seconds``."""
        row: Row = {
            "round": self.round,
            "clients": self.cohort.asked,
            "merged": self.cohort.merged,
            "refused": dict(self.cohort.refused),
            "abandoned": self.cohort.abandoned,
            "resting": self.cohort.resting,
            "bytes_down": self.training.bytes_down,
            "bytes_up": self.training.bytes_up,
            "macs": self.training.macs,
            "measuring": vars(self.measuring).copy(),
            "train_loss": self.train_loss,
        }
        if self.tiers is not None:
            row["tiers"] = {tier: dict(metrics) for tier, metrics in self.tiers.items()}
        optional = {
            "best_round": self.best_round,
            "deployed": _copied(self.deployed),
            "reported": _copied(self.reported),
            "method": dict(self.method),
        }
        return row | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_row(
        cls, row: Mapping[str, Any], coverage: Sequence[Covered] = (), seconds: float = 0.0
    ) -> RoundRecord:
        """The record of a row; a row that an older version wrote lacks what was not counted then."""
        refused, abandoned = row.get("refused", {}), row.get("abandoned", 0)
        return cls(
            round=row["round"],
            cohort=Cohort(row["clients"], row["merged"], refused, abandoned, row.get("resting", 0)),
            training=Spent(row["bytes_down"], row["bytes_up"], row["macs"]),
            measuring=Spent(**row.get("measuring", {})),
            train_loss=row.get("train_loss"),
            tiers=row.get("tiers"),
            best_round=row.get("best_round"),
            deployed=row.get("deployed", {}),
            reported=row.get("reported", {}),
            method=row.get("method", {}),
            coverage=tuple(coverage),
            seconds=seconds,
        )


def _copied(table: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: dict(values) for name, values in table.items()}


def headline(tiers: Tiers) -> str:
    """The metric that a run is judged by: the first one that is not the loss; the loss where there is no other.

    >>> headline({"0.5": {"loss": 1.2, "accuracy": 0.6}}), headline({"1": {"loss": 1.2}})
    ('accuracy', 'loss')
    """
    metrics = next(iter(tiers.values()))
    return next((name for name in metrics if name != LOSS), LOSS)


def less_is_better(metric: str) -> bool:
    """Whether a metric of this name should be small."""
    return any(word in metric.lower() for word in ("loss", "error", "perplexity"))


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    round: int
    value: float
    since: int = 0  # evaluations after it that were not better
