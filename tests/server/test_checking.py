from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.engines.settings import EngineSettings
from fedtailor.messages import Lease, Refused, Update
from fedtailor.methods.registry import get_method
from fedtailor.server.checking import check_answers, check_update
from helpers import (
    CLASSES,
    CONV1,
    CONV2,
    LINEAR,
    NORM1,
    NORM2,
    Spoiling,
    cnn_model,
    differing,
    group_of,
    image_data,
    run,
    task_for,
    with_nan_inputs,
)

MODEL = cnn_model()
HALF = prefix(MODEL.groups, as_width("1/2"))
LABELS = group_of(MODEL, f"{LINEAR}.weight", 0)
TENSORS = sorted(MODEL.weights())
FLOATS = [name for name in TENSORS if not name.endswith("num_batches_tracked")]


def good(task=None, **changes) -> Update:
    """A proper answer, with some of its fields changed."""
    task = task or TASK
    values = {name: value.clone() for name, value in task.patch.values.items()}
    update = Update(task.client.id, task.round, task.round, Patch(values, task.patch.cut), 10, {"loss": 1.0})
    return replace(update, **changes)


TASK = task_for(MODEL, HALF)


def reason(update: Update, task=TASK) -> str | None:
    refused = check_update(task, update, MODEL)
    if refused is None:
        return None
    assert (refused.client, refused.round) == (task.client.id, task.round)
    return refused.reason


def with_values(update: Update, **values) -> Update:
    """Change tensors; names are written with ``__`` for the dot."""
    changed = {name.replace("__", ".").lstrip("_"): value for name, value in values.items()}
    return replace(update, patch=Patch({**update.patch.values, **changed}, update.patch.cut))


def test_a_proper_update_passes():
    assert reason(good()) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_one_non_finite_coordinate_of_any_tensor_is_refused_by_name(name, bad):
    update = good()
    update.patch.values[name].view(-1)[-1] = bad
    refused = check_update(TASK, update, MODEL)
    assert refused == Refused(TASK.client.id, TASK.round, "non-finite", name)


@pytest.mark.parametrize("value", [-0.0, 1e-45, -1e-45, 1.1754942e-38, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("name", [name for name in FLOATS if not name.endswith("running_var")])
def test_minus_zero_subnormals_and_the_largest_number_pass(name, value):
    update = good()
    update.patch.values[name].fill_(value)
    assert reason(update) is None


@pytest.mark.parametrize("metric", [math.nan, math.inf])
def test_non_finite_metrics_are_refused(metric):
    refused = check_update(TASK, good(metrics={"loss": metric}), MODEL)
    assert refused is not None
    assert (refused.reason, refused.detail) == ("non-finite", "metric loss")


@pytest.mark.parametrize(
    "weight",
    [0, -89, -0.0, math.nan, math.inf, -math.inf, 1e15, 10.5, 11, True, "10", None, torch.tensor(3.0)],
)
def test_weights_that_do_not_count_the_clients_examples(weight):
    assert reason(good(weight=weight)) == "bad-weight"


@pytest.mark.parametrize("weight", [10, 1, 0.5, 10.0])
def test_weights_up_to_the_servers_own_record_pass(weight):
    assert reason(good(weight=weight)) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"client": 1}, "wrong-client"),
        ({"round": 1}, "wrong-round"),
        ({"round": -1}, "wrong-round"),
        ({"base_round": -1}, "wrong-round"),
    ],
)
def test_answers_to_another_task_are_refused(changes, expected):
    assert reason(good(**changes)) == expected


@pytest.mark.parametrize("missing", TENSORS)
def test_missing_names(missing):
    update = good()
    del update.patch.values[missing]
    assert reason(update) == "wrong-names"


@pytest.mark.parametrize("extra", ["9.weight", f"{CONV1}.weight@1/2", "", "../x"])
def test_extra_names(extra):
    update = good()
    update.patch.values[extra] = torch.zeros(1)
    assert reason(update) == "wrong-names"


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_shapes(name):
    value = TASK.patch.values[name]
    shapes = [
        value.reshape(*value.shape, 1),
        torch.zeros(0, dtype=value.dtype),
        value.repeat(2, *(1,) * value.dim()),
    ]
    if value.dim() > 1:
        shapes.append(value.transpose(0, 1) if value.shape[0] != value.shape[1] else value.flatten())
    if value.numel() > 1:
        shapes.append(value.flatten()[0])  # zero axes
        shapes.append(value.flatten()[:1])
    for wrong in shapes:
        update = good()
        update.patch.values[name] = wrong
        assert reason(update) == "wrong-shape", tuple(wrong.shape)


def test_a_tensor_of_the_full_size_is_not_the_leased_one():
    update = good()
    update.patch.values[f"{CONV2}.weight"] = MODEL.weights()[f"{CONV2}.weight"]
    assert reason(update) == "wrong-shape"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", [f"{CONV1}.weight", f"{NORM1}.num_batches_tracked"])
def test_wrong_types(name, dtype):
    update = good()
    update.patch.values[name] = update.patch.values[name].to(dtype)
    assert reason(update) == "wrong-dtype"


@pytest.mark.parametrize(
    "name", [f"{NORM1}.running_var", f"{NORM2}.running_var", f"{NORM2}.num_batches_tracked"]
)
def test_variances_and_counts_below_zero_are_refused(name):
    update = good()
    update.patch.values[name].view(-1)[0] = -1
    assert reason(update) == "bad-statistics"


def test_a_negative_mean_is_fine():
    update = good()
    update.patch.values[f"{NORM1}.running_mean"].fill_(-5)
    assert reason(update) is None


@pytest.mark.parametrize(
    "cut",
    [
        Cut.everything(),
        prefix(MODEL.groups, as_width("1/4")),
        Cut({**HALF.channels, LABELS: (1, 3)}, HALF.tag),
        Cut({**HALF.channels, "no such group": range(1)}, HALF.tag),
        Cut({group: tuple(unit + 1 for unit in units) for group, units in HALF.channels.items()}),
    ],
    ids=["wider", "narrower", "label rows", "unknown group", "shifted"],
)
def test_coordinates_outside_the_lease_are_refused(cut):
    update = good()
    known = Cut({group: units for group, units in cut.channels.items() if group in MODEL.groups.counts})
    values = MODEL.cut(MODEL.weights(), known).values
    assert reason(replace(update, patch=Patch(values, cut))) == "out-of-lease"


LENIENT = replace(TASK, lease=replace(TASK.lease, partial=frozenset({LABELS})))


@pytest.mark.parametrize("rows", [[0], [1, 3], [0, 1, 2], [0, 1, 2, 3]])
def test_label_rows_are_accepted_where_the_lease_says_so(rows):
    credited = Cut.of(MODEL.groups, {**HALF.channels, LABELS: rows})
    patch = MODEL.narrow(good().patch, credited)
    assert patch.values[f"{LINEAR}.bias"].shape == (len(rows),)
    assert reason(good(patch=patch), LENIENT) is None
    if len(rows) < CLASSES:
        assert reason(good(patch=patch), TASK) == "out-of-lease"


@pytest.mark.parametrize("rows", [(4,), (-1, 0), (1, 0), (0, 0), (), (0, 99)])
def test_label_rows_that_do_not_exist_are_refused(rows):
    values = {
        name: value[: len(rows)] if name.startswith(LINEAR) else value
        for name, value in good().patch.values.items()
    }
    patch = Patch(values, Cut({**HALF.channels, LABELS: rows}))
    assert reason(good(patch=patch), LENIENT) == "out-of-lease"


def test_lenience_about_labels_is_not_lenience_about_channels():
    channels = {**HALF.channels, LABELS: [0]}
    channels[group_of(MODEL, f"{CONV1}.weight", 0)] = [0]
    patch = MODEL.narrow(good().patch, Cut.of(MODEL.groups, channels))
    assert reason(good(patch=patch), LENIENT) == "out-of-lease"


def test_tagged_tensors_are_checked_against_their_plain_ones():
    name = f"{NORM1}.running_var"
    task = replace(TASK, lease=Lease(frozenset({f"{name}@1/2"}), HALF), action="calibrate")

    def answer(value: torch.Tensor) -> Update:
        return good(patch=Patch({f"{name}@1/2": value}, HALF))

    assert reason(answer(torch.ones(2)), task) is None
    assert reason(answer(torch.ones(4)), task) == "wrong-shape"
    assert reason(answer(torch.ones(2).double()), task) == "wrong-dtype"
    assert reason(answer(torch.tensor([1.0, math.nan])), task) == "non-finite"
    assert reason(answer(torch.tensor([1.0, -1.0])), task) == "bad-statistics"
    assert reason(replace(answer(torch.ones(2)), weight=1000), task) == "bad-weight"


def test_at_most_one_answer_for_each_task():
    tasks = [task_for(MODEL, HALF, number=number) for number in (4, 7)]
    first, second = (good(task) for task in tasks)
    stranger = replace(first, client=5)
    gone = Refused(7, 0, "diverged")
    updates, refused = check_answers(tasks, [first, stranger, first, gone], MODEL)
    assert updates == [first]
    assert [(each.client, each.reason) for each in refused] == [
        (4, "duplicate"),
        (5, "wrong-client"),
        (7, "diverged"),
    ]
    replayed = replace(second, round=-1)  # an old answer does not take the place of the real one
    updates, refused = check_answers(tasks, [replayed, second], MODEL)
    assert updates == [second]
    assert [(each.client, each.reason) for each in refused] == [(7, "wrong-round")]


# Through a whole round: the model must be bit-identical to the round without the refused client.


def one_nan(update: Update) -> Update:
    name = f"{CONV2}.weight"
    value = update.patch.values[name].clone()
    value.view(-1)[0] = math.nan
    return with_values(update, **{f"_{name.replace('.', '__')}": value})


def wrong_shape(update: Update) -> Update:
    return with_values(update, **{f"_{LINEAR}__bias": torch.zeros(1)})


def wrong_dtype(update: Update) -> Update:
    return with_values(update, **{f"_{LINEAR}__bias": update.patch.values[f"{LINEAR}.bias"].double()})


SPOILED = {
    "non-finite": one_nan,
    "wrong-shape": wrong_shape,
    "wrong-dtype": wrong_dtype,
    "bad-weight": lambda update: replace(update, weight=1e15),
    "wrong-round": lambda update: replace(update, round=update.round - 1),
    "wrong-names": lambda update: replace(update, patch=Patch({}, update.patch.cut)),
    "out-of-lease": lambda update: replace(update, patch=Patch(update.patch.values, Cut({LABELS: (9,)}))),
}


def spoilt_run(name: str, spoil):
    method, data = get_method(name)(), image_data((6, 5, 7, 4))
    return run(method, cnn_model(), data, "a1-e1", rounds=2, engine=lambda inner: Spoiling(inner, 2, spoil))


@cache
def lost_run(name: str):
    """The run in which nothing of client 2 arrives, and the one in which everything does."""
    return spoilt_run(name, lambda _update: None), spoilt_run(name, lambda update: update)


@pytest.mark.parametrize("name", ["fedavg", "heterofl"])
@pytest.mark.parametrize("expected", SPOILED)
def test_a_refused_client_leaves_the_model_as_the_round_without_it(name, expected):
    spoiled, (without, everyone) = spoilt_run(name, SPOILED[expected]), lost_run(name)
    assert [record.cohort.refused for record in spoiled.records] == [{expected: 1}] * 2
    assert differing(spoiled.state.weights, without.state.weights) == set()
    assert differing(spoiled.state.weights, everyone.state.weights) != set()
    assert spoiled.records[-1].tiers == without.records[-1].tiers
    assert all(math.isfinite(tier["loss"]) for tier in spoiled.records[-1].tiers.values())


def test_statistics_are_checked_like_weights():
    """sBN's answers go through the same gate: one client's NaN must not reach everybody's norm layers."""
    method, model, data = get_method("heterofl")(), cnn_model(), image_data((6, 5, 7, 4))

    def one_nan_variance(update: Update) -> Update:
        name = next(name for name in update.patch.values if "running_var@" in name)
        update.patch.values[name][0] = math.nan
        return update

    spoiled = run(method, model, data, engine=lambda e: Spoiling(e, 2, one_nan_variance, "calibrate"))
    without = run(method, model, data, engine=lambda e: Spoiling(e, 2, lambda _update: None, "calibrate"))
    assert differing(spoiled.state.weights, without.state.weights) == set()
    assert all(bool(value.isfinite().all()) for value in spoiled.state.weights.values())


@pytest.mark.parametrize("name", ["fedavg", "heterofl"])
def test_a_client_whose_loss_is_nan_is_refused_and_the_run_goes_on(name):
    method, model = get_method(name)(), cnn_model()
    clean, spoilt = image_data((6, 5, 7, 4)), with_nan_inputs(image_data((6, 5, 7, 4)), 1)
    result = run(method, model, spoilt, rounds=2, every=1)
    without = run(
        method,
        model,
        clean,
        rounds=2,
        every=1,
        engine=lambda e: Spoiling(Spoiling(e, 1, lambda _update: None), 1, lambda _update: None, "calibrate"),
    )
    statistics = {"non-finite": 1} if name == "heterofl" else {}  # the norms' are asked for and refused too
    assert [record.cohort.refused for record in result.records] == [{"diverged": 1, **statistics}] * 2
    assert differing(result.state.weights, without.state.weights) == set()
    assert all(bool(value.isfinite().all()) for value in result.state.weights.values())


def test_all_clients_refused_is_a_round_without_change_where_no_quorum_is_asked_for():
    method, model, data = get_method("fedavg")(), cnn_model(), with_nan_inputs(image_data((6,)), 0)
    result = run(method, model, data, rounds=2, rules=EngineSettings(quorum=0))
    assert differing(result.state.weights, model.weights()) == set()
    assert result.state.round == 2
    assert [record.cohort.refused for record in result.records] == [{"diverged": 1}] * 2
    assert result.records[0].train_loss is None
