"""FjORD: nested widths drawn per step, self-distillation, capacity merging, statistics of every width apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.client import training
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.selections import as_candidates, kept, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.models import build_model
from fedtailor.objective import distillation_loss
from fedtailor.seeds import Seeds
from helpers import (
    bits,
    client,
    cnn_model,
    differing,
    held_mask,
    image_data,
    images,
    mlp_model,
    run,
    update_of,
    vectors,
)

LOCAL = LocalTraining(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)
PLAIN = LocalTraining(lr=0.1, batch_size=4)
FIFTHS = as_candidates("uniform-5")


def assign(
    method: FjORD, model: ElasticModel, width: Any, number: int = 0, round: int = 0, seed: int = 0
) -> Task:
    state = replace(method.init(model), round=round)
    return method.assign(state, client(number, width, examples=40), model, Seeds(seed))


def step_widths(method: FjORD, model: ElasticModel, width: Any, steps: int = 200) -> list[tuple[str, ...]]:
    task = assign(method, model, width)
    return [tuple(cut.tag for cut in method.step_cuts(task, step, model)) for step in range(steps)]


# What must be exact


@pytest.mark.parametrize("local", [LOCAL, PLAIN, replace(LOCAL, proximal=0.1, clip_norm=0.5)])
def test_everyone_at_full_width_is_fedavg_bit_for_bit_on_trainable_tensors(local):
    model, data = cnn_model(), image_data((6, 9, 4))
    ours = run(FjORD(local, widths=(1,)), model, data, rounds=3).state.weights
    theirs = run(FedAvg(local), model, data, rounds=3).state.weights
    assert not differing({n: ours[n] for n in model.trainable}, {n: theirs[n] for n in model.trainable})
    for name in model.statistics:  # the full width's own statistics are those that FedAvg averages
        assert bits(ours[f"{name}@1"]) == bits(theirs[name])


@pytest.mark.parametrize("width", FIFTHS[:-1])
def test_weights_outside_the_prefix_leave_a_width_bit_identical(width):
    model, method = cnn_model(10, 15), FjORD(PLAIN)
    state = run(method, model, image_data((6,) * 5), "uniform-5").state
    inside = {name: held_mask(model, prefix(model.groups, width), name) for name in model.weights()}
    disturbed = {
        name: torch.where(inside[name], value, torch.full_like(value, 1e6)) if name in inside else value
        for name, value in state.weights.items()
    }
    x = images(8).columns[0]
    outputs = [
        model.build(
            method.deploy(replace(state, weights=weights), Budget(width=width), model).patches[0]
        ).eval()(x)
        for weights in (state.weights, disturbed)
    ]
    assert bits(outputs[0]) == bits(outputs[1])


@pytest.mark.parametrize("local", [LOCAL, PLAIN, replace(PLAIN, proximal=0.5)])
def test_a_client_never_changes_a_coordinate_outside_its_prefix(local):
    model, data = cnn_model(10, 15), image_data((8, 8))
    before = model.weights()
    after = run(FjORD(local), model, data, "equal-2/5", rounds=2).state.weights
    for name in sorted(model.trainable):
        held = held_mask(model, prefix(model.groups, Fraction(2, 5)), name)
        assert bits(after[name][~held]) == bits(before[name][~held])
        if name.endswith("weight"):  # a bias in front of batch norm has no gradient
            assert not torch.equal(after[name][held], before[name][held])


def test_merging_is_by_capacity_and_weighted_by_examples():
    """The authors' loop, which overwrites from the largest width to the smallest, gives the same numbers."""
    model, method = mlp_model(10), FjORD()
    state = method.init(model)
    generator = torch.Generator().manual_seed(3)
    updates = []
    for number, (width, examples) in enumerate([("1/5", 5), ("3/5", 2), ("1/5", 1), ("1", 4)]):
        patch = assign(method, model, width, number).patch
        values = {n: torch.randn(v.shape, generator=generator) for n, v in patch.values.items()}
        updates.append(update_of(number, replace(patch, values=values), examples))
    merged = method.merge(state, updates, model).weights["0.weight"]
    expected = model.weights()["0.weight"].double()
    for width in reversed(FIFTHS):
        able = [u for u in updates if len(u.patch.values["0.weight"]) >= kept(width, 10)]
        if able:
            rows = slice(0, kept(width, 10))
            total = sum(u.weight * u.patch.values["0.weight"][rows].double() for u in able)
            expected[rows] = total / sum(u.weight for u in able)
    assert torch.equal(merged, expected.float())


# Drawing widths


def test_widths_are_drawn_among_those_that_the_client_can_afford():
    drawn = Counter(step_widths(FjORD(distillation=False), mlp_model(10), "3/5", 3000))
    assert set(drawn) == {("1/5",), ("2/5",), ("3/5",)}
    assert all(abs(count - 1000) < 5 * (3000 * 2 / 9) ** 0.5 for count in drawn.values())


def test_the_distribution_is_conditioned_on_the_capacity():
    method = FjORD(widths=(0.25, 0.5, 1), probabilities=(0.2, 0.2, 0.6), distillation=False)
    drawn = Counter(step_widths(method, mlp_model(8), "1/2", 2000))
    assert set(drawn) == {("1/4",), ("1/2",)}
    assert abs(drawn["1/4",] - 1000) < 5 * (2000 / 4) ** 0.5


def test_draws_depend_on_client_round_and_step_alone():
    model, method = mlp_model(10), FjORD()

    def draws(**who: int) -> list[str]:
        task = assign(method, model, 1, **who)
        return [method.step_cuts(task, step, model)[-1].tag for step in range(40)]

    assert draws() == draws()
    assert len({tuple(draws(**who)) for who in ({}, {"number": 1}, {"round": 1}, {"seed": 1})}) == 4


def test_one_width_serves_all_layers_and_lies_inside_the_held_prefix():
    model, method = cnn_model(10, 15), FjORD()
    task = assign(method, model, "4/5")
    for step in range(50):
        for cut in method.step_cuts(task, step, model):
            assert cut == prefix(model.groups, Fraction(cut.tag))
            assert task.patch.cut.holds(cut)


def test_per_layer_draws_mix_widths_and_refuse_statistics_of_one_width():
    model = cnn_model(10, 15)
    method = FjORD(per_layer=True, norm="static", distillation=False)
    task = assign(method, model, "4/5")
    cuts = [method.step_cuts(task, step, model)[0] for step in range(100)]
    assert all(task.patch.cut.holds(cut) for cut in cuts)
    shares = {
        tuple(Fraction(len(units), model.groups.counts[g]) for g, units in cut.channels.items())
        for cut in cuts
    }
    assert len(shares) == 16  # every pair of the four admissible widths
    with pytest.raises(FedtailorError, match="set method.norm = 'static'"):
        FjORD(per_layer=True)


# Self-distillation


def test_teacher_comes_first_and_a_single_width_has_none():
    model = mlp_model(10)
    assert set(step_widths(FjORD(), model, "3/5")) == {("3/5", "1/5"), ("3/5", "2/5"), ("3/5",)}
    assert set(step_widths(FjORD(alpha=0.5), model, "2/5")) == {("2/5", "1/5"), ("2/5", "2/5")}
    for alpha in (0.0, 0.5, 1.0):
        assert set(step_widths(FjORD(alpha=alpha), model, "1/5")) == {("1/5",)}


def test_distillation_has_no_gradient_where_student_and_teacher_agree():
    logits = torch.randn(16, 10, generator=torch.Generator().manual_seed(0)).mul(3).requires_grad_()
    distillation_loss(logits, logits).backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() <= 1e-7


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_has_the_gradient_of_the_divergence_and_none_for_the_teacher(temperature):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.randn(4, 6, 10, dtype=torch.float64, generator=generator).requires_grad_() for _ in "ab"
    )
    distillation_loss(student, teacher, temperature).backward()
    assert teacher.grad is None
    copied = student.detach().clone().requires_grad_()
    target = (teacher.detach() / temperature).softmax(-1).reshape(-1, 10)
    answer = (copied / temperature).log_softmax(-1).reshape(-1, 10)
    (temperature**2 * F.kl_div(answer, target, reduction="batchmean")).backward()
    torch.testing.assert_close(student.grad, copied.grad, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Fixed(FjORD):
    """FjORD whose steps draw a given width."""

    student: str = "2/5"

    def _draw(self, widths, generator, shares=None):
        return Fraction(self.student)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_one_step_with_a_teacher_is_the_sum_of_both_gradients(alpha):
    model, data = mlp_model(10), vectors(8)
    method = Fixed(replace(PLAIN, steps=1, batch_size=8), alpha=alpha, temperature=2.0)
    task = assign(method, model, "4/5")
    patch, metrics = training.train(method, task, data, model)
    weights = {n: v.clone().requires_grad_() for n, v in task.patch.values.items()}
    (x, y) = next(iter(training.batches(method.local, task, data, skip_single=False)))

    def network(units: int) -> Tensor:
        hidden = F.relu(F.linear(x, weights["0.weight"][:units], weights["0.bias"][:units]))
        return F.linear(hidden, weights["2.weight"][:, :units], weights["2.bias"])

    teacher, student = network(8), network(4)
    loss = F.cross_entropy(teacher, y) + (1 - alpha) * F.cross_entropy(student, y)
    loss = loss + alpha * 4 * F.cross_entropy(student / 2, (teacher.detach() / 2).softmax(1))
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(
            patch.values[name], value.detach() - 0.1 * value.grad, rtol=1e-6, atol=1e-7
        )


def test_a_student_as_wide_as_its_teacher_is_a_plain_step():
    model, data = cnn_model(10, 15), images(8)
    taught, alone = (Fixed(LOCAL, distillation=on, student="4/5") for on in (True, False))
    results = [training.train(m, assign(m, model, "4/5"), data, model)[0].values for m in (taught, alone)]
    assert not differing(*results)


def test_work_counts_both_passes():
    model = cnn_model(10, 15)
    full, narrow = (model.cost(prefix(model.groups, Fraction(p))).macs for p in ("1", "2/5"))
    task = assign(Fixed(PLAIN), model, 1)
    assert Fixed(PLAIN).work(task, model).macs == 3 * (full + narrow)
    assert Fixed(PLAIN, distillation=False).work(task, model).macs == 3 * narrow
    assert FjORD(PLAIN).work(assign(FjORD(PLAIN), model, "1/5"), model).macs < 3 * narrow


# Batch norm


def statistics(values: dict[str, Tensor], tag: str) -> dict[str, bytes]:
    return {name: bits(value) for name, value in values.items() if name.endswith(f"@{tag}")}


@pytest.mark.parametrize("distillation", [False, True])
def test_a_step_moves_the_statistics_of_its_own_width_alone(distillation):
    model, data = cnn_model(10, 15), images(8)
    method = Fixed(replace(PLAIN, steps=3), distillation=distillation)
    task = assign(method, model, "4/5")
    assert not set(model.statistics) & set(task.patch.values)
    patch, _ = training.train(method, task, data, model)
    moved = {
        t
        for t in ("1/5", "2/5", "3/5", "4/5")
        if statistics(patch.values, t) != statistics(task.patch.values, t)
    }
    assert moved == ({"2/5", "4/5"} if distillation else {"2/5"})
    assert patch.values["1.num_batches_tracked@2/5"] == 3


def test_statistics_are_those_of_a_small_network_trained_by_itself():
    model, data = cnn_model(10, 15), images(8)
    method = Fixed(replace(PLAIN, steps=4), distillation=False)
    patch, _ = training.train(method, assign(method, model, 1), data, model)
    alone = FedAvg(method.local, width="2/5")
    task = alone.assign(alone.init(model), client(0, 1, examples=40), model, Seeds(0))
    expected, _ = training.train(alone, task, data, model)
    for name in model.statistics:
        assert bits(patch.values[f"{name}@2/5"]) == bits(expected.values[name])


def test_each_width_is_merged_over_the_clients_that_hold_it_and_deployed_by_itself():
    model, data, method = cnn_model(10, 15), image_data((6, 6)), FjORD(PLAIN)
    small = run(method, model, data, "equal-2/5").state
    assert {name.partition("@")[2] for name in small.weights if "@" in name} == {"1/5", "2/5"}
    fresh = model.weights()
    for name in model.statistics:
        assert bits(small.weights[name]) == bits(fresh[name])
        deployed = method.deploy(small, Budget(width=0.4), model).patches[0]
        assert bits(deployed.values[name]) == bits(small.weights[f"{name}@2/5"])
    wide = method.deploy(small, Budget(width=1), model).patches[0]  # nobody has trained it: as it began
    assert bits(wide.values["1.running_mean"]) == bits(fresh["1.running_mean"])


def test_widths_that_keep_equally_many_channels_have_statistics_of_their_own():
    model, method = cnn_model(2, 2), FjORD(PLAIN)
    state = run(method, model, image_data((8,)), "equal", rounds=2).state
    pieces = [method.deploy(state, Budget(width=w), model).patches[0] for w in ("4/5", "1")]
    assert pieces[0].cut == pieces[1].cut
    assert bits(pieces[0].values["1.running_mean"]) != bits(pieces[1].values["1.running_mean"])
    tiers = run(method, model, image_data((8,) * 5), "uniform-5", every=1).records[-1].tiers
    assert tiers["0.8"] != tiers["1"]


# Recurrent networks


def test_a_sliced_lstm_is_a_small_lstm_of_the_gate_rows_behind_a_whole_embedding():
    full = build_model("char-lstm", input_shape=(12,), num_classes=20, hidden=10, embedding=6)
    text = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    model, method = elastic(full, (text, text[:, 0])), FjORD()
    patch = method.deploy(method.init(model), Budget(width=0.4), model).patches[0]
    small = build_model("char-lstm", input_shape=(12,), num_classes=20, hidden=4, embedding=6)
    rows = [gate * 10 + unit for gate in range(4) for unit in range(4)]
    for mine, theirs in zip((small.lstm1, small.lstm2), (full.lstm1, full.lstm2), strict=True):
        mine.weight_ih_l0.data = theirs.weight_ih_l0.data[rows][:, : mine.weight_ih_l0.shape[1]].clone()
        mine.weight_hh_l0.data = theirs.weight_hh_l0.data[rows][:, :4].clone()
        mine.bias_ih_l0.data, mine.bias_hh_l0.data = (
            theirs.bias_ih_l0.data[rows],
            theirs.bias_hh_l0.data[rows],
        )
    small.embedding.load_state_dict(full.embedding.state_dict())
    small.head.linear.weight.data = full.head.linear.weight.data[:, :4].clone()
    small.head.linear.bias.data = full.head.linear.bias.data
    with torch.no_grad():
        assert bits(model.build(patch)(text)) == bits(small(text))
    sliced = FjORD(slice_embeddings=True).deploy(method.init(model), Budget(width=0.4), model).patches[0]
    assert sliced.values["embedding.weight"].shape == (20, 3)


def test_the_shakespeare_network_has_the_papers_parameters():
    """12.4 / 40.2 / 82.2 / 141.9 / 214.5 thousand, with an embedding that is not sliced."""
    text = torch.zeros(2, 80, dtype=torch.int64)
    model = elastic(build_model("char-lstm", input_shape=(80,), num_classes=86), (text, text[:, 0]))
    costs = [model.cost(FjORD().cut_at(width, model)).params for width in FIFTHS]
    assert [round(cost / 1000, 1) for cost in costs] == [12.4, 40.2, 82.2, 141.9, 214.5]
