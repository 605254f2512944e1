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
from fedtailor.fleet.devices.trips import Trip
from fedtailor.merging.optimising import VERDICT
from fedtailor.messages import Refused, Update
from fedtailor.record import LOSS, Best, Cohort, Covered, RoundRecord, Simulated, Spent
from fedtailor.server import faults
from fedtailor.server.audited import audited
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
        merge=after.state.moments.get(VERDICT, {}),
        audit=audited(tries, after.state, _masked(setup)) if setup.audited else None,
        coverage=covered(merged),
        seconds=round(seconds, 4),
        failed=faults.failures(_refusals(tries, evaluation)),
        simulated=simulated(setup, tries),
        privacy=setup.between.spent() if setup.between is not None else {},
    )
    return record if evaluation is None else evaluated(record, evaluation, after.best)


def _masked(setup: Setup) -> Mapping[int, str] | None:
    return None if setup.masks is None else setup.masks.digests


def simulated(setup: Setup, tries: Sequence[Try]) -> Simulated | None:
    """What all tries of a round took on the devices, in all and by class; nothing without devices."""
    equipment, clients = setup.fleet.equipment, setup.data.num_clients
    if equipment is None:
        return None
    names = [tier.name for tier in setup.fleet.whole or setup.fleet.tiers]
    by_class: dict[str, Counter[str]] = {}
    for tried in tries:
        answered = {update.client for update in tried.updates}
        for task in tried.tasks:
            client = task.client.id
            spent = by_class.setdefault(names[equipment.tier(client, clients)], Counter())
            way = tried.table.trips[client] if tried.table else Trip(0, 0, 0)
            spent.update(
                {"asked": 1, "answered": int(client in answered), "bytes_down": task.nbytes,
                 "seconds": way.seconds, "compute": way.compute, "joules": way.joules}
            )  # fmt: skip
    tables = [tried.table for tried in tries if tried.table is not None]
    return Simulated(
        seconds=_short(sum(each.seconds for each in tables)),
        joules=_short(sum(each.joules for each in tables)),
        idle=_short(sum(each.idle for each in tables)),
        by_class={
            name: {key: _short(value) for key, value in by_class[name].items()}
            for name in names
            if name in by_class
        },
    )


def _short(value: float) -> float:
    """Enough digits for people and sums, so that rows stay short."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


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
    addresses: dict[int, str] = {}  # by the id of a cut, which clients of one piece share
    for update in updates:
        cut = update.patch.cut
        if id(cut) not in addresses:
            addresses[id(cut)] = json.dumps(cut_value(Cut(cut.channels, absent=cut.absent)), sort_keys=True)
        address = addresses[id(cut)]
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
