"""Where the record of a round is made; from here on it is only written, read, shown and tracked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.encoding import cut_value
from fedtailor.elasticity.cutting.names import is_tagged, tag_of
from fedtailor.messages import Refused, Update
from fedtailor.record import LOSS, Best, Cohort, Covered, RoundRecord, Spent
from fedtailor.server import faults
from fedtailor.server.bytes_and_macs import training_spent
from fedtailor.server.evaluation import Evaluation
from fedtailor.server.faults import Try
from fedtailor.server.setup import Setup
from fedtailor.storage.checkpoint import Checkpoint
from fedtailor.storage.rows import as_text

ACCOUNTED = (LOSS, "examples")  # metrics of a client that go into sums; others are written for each


def round_record(
    setup: Setup, after: Checkpoint, tries: Sequence[Try], evaluation: Evaluation | None, seconds: float
) -> RoundRecord:
    """The record of the round that ``after`` is the end of; abandoned tries cost too, only the last is learnt from."""
    merged = tries[-1].updates
    by_tier = training_spent(setup, tries)
    said = setup.method.notes(after.state, merged, setup.model)
    record = RoundRecord(
        round=after.state.round,
        cohort=_cohort(setup, after, tries, evaluation),
        training=sum(by_tier.values(), Spent()),
        by_tier=by_tier,
        train_loss=_train_loss(merged),
        reported=_reported(merged),
        method=json.loads(as_text(said)),  # as it will be read back: a tuple becomes a list
        coverage=covered(merged),
        seconds=round(seconds, 4),
        failed=faults.failures(_refusals(tries, evaluation)),
    )
    return record if evaluation is None else evaluated(record, evaluation, after.best)


def evaluated(record: RoundRecord, evaluation: Evaluation, best: Best | None) -> RoundRecord:
    """The record with what an evaluation found and what it cost."""
    return replace(
        record,
        measuring=evaluation.spent,
        tiers=evaluation.scores.tiers,
        validation=evaluation.validation,
        best_round=best.round if best else None,
        deployed=evaluation.scores.deployed,
    )


def covered(updates: Sequence[Update]) -> tuple[Covered, ...]:
    """How many updates hold the same coordinates; weights under a tag (``conv1.weight@base3``) are told by the tag."""
    counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for update in updates:
        cut = update.patch.cut
        address = json.dumps(cut_value(Cut(cut.channels, absent=cut.absent)), sort_keys=True)
        weights = [name for name, value in update.patch.values.items() if value.dim() >= 2]
        tags = sorted({tag_of(name) for name in weights if is_tagged(name)})
        counted[address, tuple(tags)] += 1
    return tuple(
        Covered(count, json.loads(address), tags) for (address, tags), count in sorted(counted.items())
    )


def _refusals(tries: Sequence[Try], evaluation: Evaluation | None) -> list[Refused]:
    refused = [each for tried in tries for each in tried.refused]
    return refused + list(evaluation.refused if evaluation else ())


def _cohort(setup: Setup, after: Checkpoint, tries: Sequence[Try], evaluation: Evaluation | None) -> Cohort:
    refused = _refusals(tries, evaluation)
    return Cohort(
        asked=sum(len(tried.tasks) for tried in tries),
        merged=len(tries[-1].updates),
        refused=faults.counted(refused),
        refused_by=faults.counted_by_client(refused),
        abandoned=len(tries) - 1,
        resting=len(faults.resting(after.strikes, setup.settings.engine)),
        measured_on=evaluation.sampled if evaluation else 0,
        too_small=setup.clients(after.state.round - 1).left_out if setup.fleet.whole else 0,
    )


def _train_loss(merged: Sequence[Update]) -> float | None:
    """The mean over those who told theirs; a loss that is missing is missing, and not 0."""
    told = [update for update in merged if LOSS in update.metrics]
    weight = sum(update.weight for update in told)
    loss = sum(update.metrics[LOSS] * update.weight for update in told)
    return loss / weight if weight else None


def _reported(merged: Sequence[Update]) -> Mapping[str, Mapping[str, Any]]:
    """What clients said beyond what is summed; nothing where nobody said anything."""
    reported = {
        str(update.client): {n: value for n, value in update.metrics.items() if n not in ACCOUNTED}
        for update in merged
    }
    return reported if any(reported.values()) else {}
