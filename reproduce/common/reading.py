"""What the common benchmark reads off a finished run, beside its accuracy: the way there, and who computed how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedtailor.report.targets import mean_over_tiers, spent_until
from fedtailor.storage.run_folder import RunFolder
from reproduce.shared.figures import percent
from reproduce.shared.results import Result

# Methods that keep embeddings whole cost up to 9 % more at a width than those that cut all: the same device runs them.
TOLERANCE = 0.1


def course(folder: RunFolder) -> Result:
    """At every evaluation: rounds, bytes of training and measuring, multiply-accumulates, the mean over tiers."""
    records = folder.records()
    return {
        "course": [
            [record.round, spent.bytes, spent.macs, percent(mean_over_tiers(record.tiers, "accuracy"))]
            for record, spent in zip(records, spent_until(records), strict=True)
            if record.tiers
        ]
    }


def costs_by_tier(folder: RunFolder) -> Result:
    """The multiply-accumulates of training that a client of each tier spent in a round, on average."""
    macs: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for record in folder.records():
        for tier, spent in record.by_tier.items():
            macs[tier] += spent.macs
            answers[tier] += spent.answered
    return {"macs_of_a_client": {tier: round(macs[tier] / answers[tier]) for tier in macs if answers[tier]}}


def out_of_reach(folder: RunFolder, allowed: Mapping[str, int]) -> Result:
    """The tiers that cannot pay for the network that they were evaluated on, where there are any."""
    last = next(record for record in reversed(folder.records()) if record.tiers)
    found = [tier for tier, cost in last.deployed.items() if cost["macs"] > (1 + TOLERANCE) * allowed[tier]]
    return {"beyond": found} if found else {}
