"""Patches with masks on the wire, against the lease, in checkpoints and in worker processes."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Levels, Mask
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.values import (
    answer_of,
    answer_value,
    evaluation_of,
    evaluation_value,
    task_of,
    task_value,
)
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.messages import Client, Lease, Task, Update
from fedtailor.methods.ofa_fl.ofa_fl import OFAFL
from fedtailor.methods.pruning import prunable
from fedtailor.seeds import Seeds
from fedtailor.server.checking import check_update
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings
from fedtailor.storage.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from fedtailor.storage.patch_frames import (
    LeasedFrame,
    decode_levels,
    decode_patch,
    encode_levels,
    encode_patch,
)
from fedtailor.storage.wire import DecodeError, decode, encode
from helpers import bits, cnn_model, differing, image_data, setup_of

MODEL = cnn_model()
RATIOS = (1, 0.6, 0.3)
FLEET = Fleet(tuple(Tier(str(r), Budget(density=r), Fraction(1)) for r in reversed(RATIOS)))
RULES = OFAFL(
    ratios=RATIOS, trigger="schedule", first=1, every=2,
    local=LocalTraining(batch_size=4, momentum=0.9, weight_decay=0.01),
)  # fmt: skip


def joined(pieces) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def through(value):
    return decode(joined(encode(value)))


def masked_task(density=0.3) -> Task:
    state = RULES.begin(replace(RULES.init(MODEL), round=1), MODEL)
    state = RULES.begin(replace(state, round=3), MODEL)
    return RULES.assign(state, Client(4, "t", Budget(density=density), 10), MODEL, Seeds(0))


TASK = masked_task()
LEVELS = TASK.patch.cut.mask.levels
LEASE = LeasedFrame(TASK.lease, MODEL)


def test_bytes_on_the_wire_are_survivors_and_rest_and_header():
    head, *_ = encode_patch(TASK.patch)
    data = joined(encode_patch(TASK.patch))
    total = sum(each.numel() for each in LEVELS.maps.values())
    rest = sum(v.numel() for n, v in TASK.patch.values.items() if n not in LEVELS.maps)
    assert len(data) == 4 * round(Fraction("0.3") * total) + 4 * rest + len(bytes(head)) == LEASE.limit
    assert len(data) == len(bytes(head)) + TASK.patch.nbytes
    frame = joined(encode_levels(LEVELS))
    assert len(frame) == len(bytes(encode_levels(LEVELS)[0])) + total
    assert TASK.nbytes == TASK.patch.nbytes + total
    assert replace(TASK, levels=None).nbytes == TASK.patch.nbytes


def test_a_masked_patch_comes_back():
    again = decode_patch(joined(encode_patch(TASK.patch)), LEASE)
    assert again.cut == TASK.patch.cut
    assert not differing(again.values, TASK.patch.values)


def other_levels() -> Levels:
    return Levels({name: each.flip(0) for name, each in LEVELS.maps.items()})


@pytest.mark.parametrize(
    "cut",
    [
        Cut(tag="3/10", mask=Mask(other_levels(), 2)),
        Cut(tag="3/10", mask=Mask(LEVELS, 1)),
        Cut(tag="3/10"),
        Cut(tag="3/10", mask=Mask(LEVELS, 0)),
    ],
)
def test_another_mask_than_the_leased_one_is_refused(cut):
    patch = MODEL.cut(MODEL.weights(), cut, TASK.patch.values)
    with pytest.raises(DecodeError):
        decode_patch(joined(encode_patch(patch)), LEASE)
    refused = check_update(TASK, Update(4, TASK.round, TASK.round, patch, 10), MODEL)
    assert refused is not None
    assert refused.reason == "out-of-lease"


def test_too_many_or_too_few_survivors_are_refused():
    name = prunable(MODEL)[0]
    for values in (TASK.patch.values[name][:-1], MODEL.spread(TASK.patch).values[name]):
        patch = Patch({**TASK.patch.values, name: values}, TASK.patch.cut)
        with pytest.raises(DecodeError):
            decode_patch(joined(encode_patch(patch)), LEASE)
        refused = check_update(TASK, Update(4, TASK.round, TASK.round, patch, 10), MODEL)
        assert refused is not None
        assert refused.reason == "wrong-shape"
    fine = Update(4, TASK.round, TASK.round, TASK.patch, 10)
    assert check_update(TASK, fine, MODEL) is None


def test_a_map_of_levels_comes_back_and_any_other_frame_is_refused():
    frame = joined(encode_levels(LEVELS))
    again = decode_levels(frame, prunable(MODEL), MODEL)
    assert again == LEVELS
    assert all(bits(again.maps[name]) == bits(each) for name, each in LEVELS.maps.items())
    for bad in (frame[:-1], frame + b"\0", b"", b"x" + frame[1:], joined(encode_patch(TASK.patch))):
        with pytest.raises(DecodeError):
            decode_levels(bad, prunable(MODEL), MODEL)
    with pytest.raises(DecodeError):
        decode_levels(frame, prunable(MODEL)[:-1], MODEL)


@pytest.mark.parametrize("density", RATIOS)
@pytest.mark.parametrize("fresh", [True, False])
def test_tasks_answers_and_evaluations_travel_to_workers(density, fresh):
    task = masked_task(density)
    task = task if fresh else replace(task, levels=None)
    there = task_of(through(task_value(task)), through(dict(task.patch.values)))
    assert there.patch.cut == task.patch.cut == there.lease.cut
    assert there.patch.cut.mask == task.patch.cut.mask
    assert (there.levels is None) == (task.levels is None)
    assert there.nbytes == task.nbytes
    update = Update(4, 1, 1, task.patch, 10)
    back = answer_of(through(answer_value(update)), LEVELS)
    assert (back.patch.cut, back.patch.cut.mask) == (task.patch.cut, task.patch.cut.mask)
    values = dict(task.patch.values)
    question = evaluation_value([[task.patch], [task.patch]], range(2), "evaluate")
    assert len(question["levels"]) == (task.patch.cut.mask is not None)  # one map for all tiers
    for (patch,) in evaluation_of(through(question), through([values, values]))[0]:
        assert patch.cut == task.patch.cut
        assert patch.cut.mask == task.patch.cut.mask
        assert not differing(patch.values, values)


def test_a_mask_of_a_map_that_did_not_travel_is_refused():
    value = through(answer_value(Update(4, 1, 1, TASK.patch, 10)))
    for levels in (None, other_levels()):
        with pytest.raises(FedtailorError, match="which did not travel with it"):
            answer_of(value, levels)


# Whole runs across pruning events

DATA = image_data((6, 5, 7, 4, 6, 5))
ROUNDS = 5


def rounds(engine, until: int = ROUNDS, start: Checkpoint | None = None):
    rows = []
    setup = setup_of(RULES, MODEL, DATA, FLEET, RoundSettings(until, 6, 1))
    end = run_rounds(setup, engine, lambda record, _at: rows.append(record.as_row()), start)
    return end, rows


@pytest.mark.slow
def test_interrupted_around_every_event_and_with_workers_the_bits_are_the_same():
    whole, rows = rounds(InProcess(RULES, MODEL, DATA))
    assert [len(row["method"]["supported"]) for row in rows] == [1, 2, 2, 3, 3]
    saved, seen = None, []
    for until in range(1, ROUNDS + 1):
        at, part = rounds(InProcess(RULES, MODEL, DATA), until, saved)
        saved, seen = decode_checkpoint(joined(encode_checkpoint(at))), seen + part
    assert json.dumps(seen) == json.dumps(rows)
    assert joined(encode_checkpoint(saved)) == joined(encode_checkpoint(whole))
    with WorkerPool(RULES, MODEL, DATA, 1) as pool:
        at, part = rounds(pool)
    assert json.dumps(part) == json.dumps(rows)
    assert joined(encode_checkpoint(at)) == joined(encode_checkpoint(whole))


def test_a_lease_without_a_mask_does_not_take_a_masked_update():
    task = replace(TASK, lease=Lease(TASK.lease.names, Cut.everything()))
    refused = check_update(task, Update(4, TASK.round, TASK.round, TASK.patch, 10), MODEL)
    assert refused is not None
    assert refused.reason == "out-of-lease"
    assert torch.is_tensor(TASK.patch.values[prunable(MODEL)[0]])
