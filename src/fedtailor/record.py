"""The record of a round: what was asked and merged, what it cost, what was measured, what the method has to say.

It is made in one place (``server.recording``), written and read by a run folder, shown, tracked and reported from
there. On disk it is one flat row of ``metrics.jsonl``; three parts stand elsewhere: ``coverage``, which may be long, in
``coverage.jsonl``, and ``seconds`` and ``failed``, which may differ from run to run, in ``events.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import Any, Self

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
    too_small: int = 0  # clients that take no part, because no piece of the model fits them
    refused_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # client -> reason -> how often
    measured_on: int = 0  # clients that were asked to measure, where these were not all


@dataclass(frozen=True)
class Spent:
    """What some work cost: bytes on the wire, without headers, and multiply-accumulates on clients."""

    bytes_down: int = 0
    bytes_up: int = 0
    macs: int = 0

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        """The sum of parts, of a round's hundreds in one go."""
        names = [item.name for item in fields(cls)]
        rows = zip(*(attrgetter(*names)(part) for part in parts), strict=True)
        return cls(*map(sum, rows))

    def __add__(self, other: Self) -> Self:
        return self.total((self, other))

    @property
    def bytes(self) -> int:
        """Both ways."""
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class TierSpent(Spent):
    """What training cost all clients that were of one tier in a round, and how many these were."""

    asked: int = 0
    answered: int = 0  # those whose updates could be used: they alone count in ``bytes_up`` and ``macs``
    examples: int = 0  # that these trained on, as often as they saw them
    parameters: int = 0  # weights and biases that those who were asked were sent


@dataclass(frozen=True)
class Simulated:
    """What a round took on the devices themselves, in simulated time and energy."""

    seconds: float = 0.0
    joules: float = 0.0
    idle: float = 0.0  # seconds that clients who were done waited for others, summed
    by_class: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of devices, by their own tier

    def __add__(self, other: Simulated) -> Simulated:
        """Totals, without classes."""
        return Simulated(self.seconds + other.seconds, self.joules + other.joules, self.idle + other.idle)


@dataclass(frozen=True)
class Covered:
    """So many clients sent just these channels and tensors: ``cut`` as ``cutting.encoding`` writes it, tags of weights.

    Masks are left out: which single weights of these a client sent is not told.
    """

    count: int
    cut: Mapping[str, Any]
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(self.tags))  # a list, where it was read from a file


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
    merge: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # clients that [merge] clipped, or left unheard
    audit: Mapping[str, Any] | None = None  # of runs with a signed log: leases, verdicts, digests
    coverage: Sequence[Covered] = ()  # equal cuts of merged updates
    seconds: float = 0.0
    by_tier: Mapping[str, TierSpent] = field(default_factory=dict)  # ``training`` by the clients' tiers
    validation: Tiers | None = None  # as ``tiers``, on the examples that choose, where there are such
    failed: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # what clients' code raised -> which clients
    simulated: Simulated | None = None  # of fleets of devices
    privacy: Mapping[str, Any] = field(
        default_factory=dict
    )  # of private runs: releases, delta, tiers' epsilon

    @property
    def spent(self) -> Spent:
        """What training and measuring cost together."""
        return self.training + self.measuring

    def as_row(self) -> Row:
        """The flat row of ``metrics.jsonl``: everything but ``coverage``, ``seconds`` and ``failed``."""
        row: Row = {}
        usual = RoundRecord(self.round)
        for key, path in KEYS.items():
            value = attrgetter(path)(self)
            if key not in SOMETIMES or value != attrgetter(path)(usual):
                _put(row, key, _copied(value))
        return row

    @classmethod
    def from_row(
        cls,
        row: Mapping[str, Any],
        coverage: Sequence[Covered] = (),
        seconds: float = 0.0,
        failed: Mapping[str, Sequence[str]] | None = None,
    ) -> RoundRecord:
        """The record of a row; what an older version did not count has its default, a newer one's keys are left out."""
        parts: Row = {part: {} for part in PARTS}
        for key, path in KEYS.items():
            above, _, name = key.rpartition(".")
            table = row.get(above, {}) if above else row
            if name in table:
                _put(parts, path, table[name])
        made: Row = {part: kind(**parts[part]) for part, kind in PARTS.items()}
        if parts.get("simulated") is not None:
            made["simulated"] = _simulated(parts["simulated"])
        made["by_tier"] = {tier: _tier_spent(each) for tier, each in parts.get("by_tier", {}).items()}
        raised = {error: tuple(clients) for error, clients in (failed or {}).items()}
        return cls(**{**parts, **made}, coverage=tuple(coverage), seconds=seconds, failed=raised)


# Fields of a record that have fields of their own.
PARTS = {"cohort": Cohort, "training": Spent, "measuring": Spent}

# The keys of a row, in their order, and the field that each is; a dot is a table in the row, a part in the record.
KEYS = {
    "round": "round",
    "clients": "cohort.asked",  # the older word of the two: folders of users have it
    "merged": "cohort.merged",
    "refused": "cohort.refused",
    "refused_by": "cohort.refused_by",
    "abandoned": "cohort.abandoned",
    "resting": "cohort.resting",
    "too_small": "cohort.too_small",
    "measured_on": "cohort.measured_on",
    "bytes_down": "training.bytes_down",
    "bytes_up": "training.bytes_up",
    "macs": "training.macs",
    "measuring.bytes_down": "measuring.bytes_down",
    "measuring.bytes_up": "measuring.bytes_up",
    "measuring.macs": "measuring.macs",
    "by_tier": "by_tier",
    "train_loss": "train_loss",
    "tiers": "tiers",
    "validation": "validation",
    "best_round": "best_round",
    "deployed": "deployed",
    "reported": "reported",
    "method": "method",
    "merge": "merge",
    "simulated": "simulated",
    "privacy": "privacy",
}
SOMETIMES = (
    "too_small",
    "measured_on",
    "refused_by",
    "by_tier",
    "tiers",
    "validation",
    "best_round",
    "deployed",
    "reported",
    "method",
    "merge",
    "simulated",
    "privacy",
)  # not written where there is nothing


def _put(table: Row, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        table = table.setdefault(part, {})
    table[last] = value


def _copied(value: Any) -> Any:
    """Mappings as dictionaries of their own, however deep."""
    if isinstance(value, TierSpent | Simulated):
        return asdict(value)
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _tier_spent(table: Mapping[str, int]) -> TierSpent:
    known = {item.name for item in fields(TierSpent)}
    return TierSpent(**{name: value for name, value in table.items() if name in known})


def _simulated(table: Mapping[str, Any]) -> Simulated:
    known = {item.name for item in fields(Simulated)}
    return Simulated(**{name: value for name, value in table.items() if name in known})


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
