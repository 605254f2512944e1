from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import fit
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import evaluate_tiers
from helpers import (
    CLASSES,
    CONV1,
    CONV2,
    LINEAR,
    NORM1,
    NORM2,
    bits,
    client,
    cnn_model,
    differing,
    federated,
    held_mask,
    image_data,
    images,
    mlp_model,
    run,
    setup_of,
    tiny_cnn,
    tiny_mlp,
    vector_data,
    vectors,
)

LEVELS = {"a": "1", "b": "1/2", "c": "1/4", "d": "1/8", "e": "1/16"}
PLAIN = {"masked_loss": False, "label_rows": False}
TRAINABLE = {
    f"{layer}.{kind}" for layer in (CONV1, NORM1, CONV2, NORM2, LINEAR) for kind in ("weight", "bias")
}


def cut_of(model, level: str):
    return fit(model.costs, Budget(width=LEVELS[level]))


def task_of(method, model, level: str = "a", number: int = 0, examples: int = 6):
    one = client(number, LEVELS[level], examples, level)
    return method.assign(method.init(model), one, model, Seeds(0))


def test_the_papers_preset():
    method = HeteroFL()
    assert (method.norm, method.weighting, method.local.clip_norm) == ("static", "count", 1.0)
    assert method.scaler
    assert method.masked_loss
    assert method.label_rows


@pytest.mark.parametrize("local", [
    LocalTraining(),
    LocalTraining(batch_size=4, epochs=2, momentum=0.9, weight_decay=5e-4),
    LocalTraining(batch_size=3, steps=4, momentum=0.5, nesterov=True),
])  # fmt: skip
@pytest.mark.parametrize("scaler", [True, False])
def test_all_clients_at_level_a_with_equal_counts_are_federated_averaging_bit_for_bit(local, scaler):
    model, data = cnn_model(8, 16), image_data((7,) * 5)
    ours = run(HeteroFL(local, scaler=scaler, **PLAIN), model, data, "a1", rounds=3, cohort=3)
    theirs = run(FedAvg(local), model, data, "a1", rounds=3, cohort=3)
    trained = [{name: state.weights[name] for name in TRAINABLE} for state in (ours.state, theirs.state)]
    assert differing(*trained) == set()
    assert all(
        bits(trained[0][name]) != bits(model.weights()[name])
        for name in TRAINABLE - {f"{CONV1}.bias", f"{CONV2}.bias"}
    )


@pytest.mark.parametrize("change", [{"weighting": "samples"}, {"weighting": "count"}])
def test_unequal_counts_agree_with_averaging_of_the_same_weighting_only(change):
    model, data = cnn_model(), image_data((7, 4, 9))
    ours = run(HeteroFL(LocalTraining(), **PLAIN, **change), model, data, "a1").state.weights
    theirs = run(FedAvg(LocalTraining()), model, data, "a1").state.weights
    equal = differing({n: ours[n] for n in TRAINABLE}, {n: theirs[n] for n in TRAINABLE}) == set()
    assert equal == (change["weighting"] == "samples")


def test_each_extra_changes_the_result():
    """Otherwise the agreement above would be the agreement of settings that do nothing."""
    model, data = cnn_model(), federated(images(24), (2, 3, 2, 3), test=images(8))
    plain = HeteroFL(LocalTraining(), scaler=False, **PLAIN)
    base = run(plain, model, data, "a1-b1").state.weights
    for change in ({"masked_loss": True}, {"label_rows": True}, {"local": LocalTraining(clip_norm=0.01)}):
        assert differing(base, run(replace(plain, **change), model, data, "a1-b1").state.weights) != set(), (
            change
        )
    mlp, rows = mlp_model(), vector_data()
    without, with_scaler = (
        run(replace(plain, scaler=on), mlp, rows, "b1").state.weights for on in (False, True)
    )
    assert differing(without, with_scaler) != set()


# Levels


def test_levels_are_nested():
    model = cnn_model(16, 32)
    for smaller, larger in ("ed", "dc", "cb", "ba"):
        inside, outside = cut_of(model, smaller), cut_of(model, larger)
        assert outside.holds(inside)
        assert not inside.holds(outside)
        for name in model.weights():
            small, large = held_mask(model, inside, name), held_mask(model, outside, name)
            assert not bool((small & ~large).any()), name


def test_levels_keep_the_rounded_up_prefix_of_every_layer():
    model = cnn_model(16, 33)
    expected = {"a": (16, 33), "b": (8, 17), "c": (4, 9), "d": (2, 5), "e": (1, 3)}
    for level, (first, second) in expected.items():
        values = task_of(HeteroFL(), model, level).patch.values
        assert values[f"{CONV1}.weight"].shape == (first, 1, 3, 3)
        assert values[f"{CONV2}.weight"].shape == (second, first, 3, 3)
        assert values[f"{NORM2}.weight"].shape == (second,)
        assert values[f"{LINEAR}.weight"].shape == (CLASSES, second * 4)
        assert torch.equal(values[f"{CONV2}.weight"], model.weights()[f"{CONV2}.weight"][:second, :first])
        assert torch.equal(values[f"{LINEAR}.weight"], model.weights()[f"{LINEAR}.weight"][:, : second * 4])
        assert not set(values) & set(model.statistics)  # scale and shift travel, statistics do not


@pytest.mark.parametrize("level", "bcde")
@pytest.mark.parametrize(
    "method", [HeteroFL(LocalTraining(momentum=0.9, weight_decay=0.1)), HeteroFL(**PLAIN)]
)
def test_a_small_client_never_changes_a_coordinate_outside_its_prefix(method, level):
    model, data = cnn_model(16, 32), image_data((8,))
    merged = run(method, model, data, f"{level}1", rounds=2).state.weights
    moved = 0
    for name, value in model.weights().items():
        outside = ~held_mask(model, cut_of(model, level), name)
        assert bits(merged[name][outside]) == bits(value[outside]), name
        moved += int((merged[name] != value).sum())
    assert moved > 10


def test_every_coordinate_is_the_mean_over_the_clients_that_hold_it():
    method, model, data = HeteroFL(**PLAIN), cnn_model(), image_data((6, 6))
    small, large = (
        method.perform(task_of(method, model, level, number), data.client(number), model).patch
        for number, level in ((0, "b"), (1, "a"))
    )
    merged = run(method, model, data, "a1-b1").state.weights
    for name in TRAINABLE:
        both = held_mask(model, small.cut, name)
        placed = model.place(model.weights(), small)[name]
        assert bits(merged[name][~both]) == bits(large.values[name][~both])
        mean = (placed[both].double() + large.values[name][both].double()) / 2
        torch.testing.assert_close(merged[name][both].double(), mean, rtol=1e-7, atol=1e-9)


def test_dynamic_levels_are_redrawn():
    method, model, data = HeteroFL(), cnn_model(), image_data((4,) * 6)
    seen = {}
    for dynamic in (False, True):
        fleet = fleet_by_name("a1-e1", dynamic=dynamic)
        rows = run(method, model, data, fleet, rounds=4).records
        seen[dynamic] = len({record.training.bytes_down for record in rows})
    assert seen[False] == 1
    assert seen[True] > 1


# The scaler


def training_output(method: HeteroFL, model, level: str, batch) -> torch.Tensor:
    task = task_of(method, model, level)
    return method.forward(task.patch.values, task.patch.cut, batch, task, model).detach()


@pytest.mark.parametrize("level", "bcde")
def test_scaler_in_front_of_batch_norm_is_no_scaler(level):
    """To 1e-4 where activations are not tiny: what is left is the epsilon of the norm."""
    module = tiny_cnn(16, 32)
    with torch.no_grad():
        for layer in (CONV1, CONV2):
            module.get_submodule(layer).weight.mul_(10)
    batch = images(32).take(torch.arange(32))
    model = elastic(module, batch)
    scaled, plain = (training_output(HeteroFL(scaler=on), model, level, batch) for on in (True, False))
    assert (scaled - plain).abs().max() <= 1e-4 * plain.abs().max()
    assert bits(scaled) != bits(plain)  # equal up to epsilon, not by being switched off


@pytest.mark.parametrize("level", "bcde")
def test_scaler_in_front_of_batch_norm_is_a_smaller_epsilon(level):
    """BN(x / s) with epsilon is BN(x) with epsilon * s squared, exactly."""
    share = float(Fraction(LEVELS[level]))
    inputs, labels = images(32).take(torch.arange(32))
    outputs = []
    for on, epsilon in ((True, 1e-2), (False, 1e-2 * share**2)):
        module = tiny_cnn(16, 32).double()
        for layer in (NORM1, NORM2):
            module.get_submodule(layer).eps = epsilon
        batch = (inputs.double(), labels)
        outputs.append(training_output(HeteroFL(scaler=on), elastic(module, batch), level, batch))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("width", "kept"), [("1/2", 4), ("1/4", 2), ("3/8", 3)])
def test_scaler_divides_hidden_outputs_by_the_width(width, kept):
    model, batch = mlp_model(8), vectors(6).take(torch.arange(6))
    method = HeteroFL()
    task = method.assign(method.init(model), client(0, width), model, Seeds(0))
    actual = method.forward(task.patch.values, task.patch.cut, batch, task, model)
    first, second = model.module[0], model.module[2]
    hidden = torch.relu((batch[0] @ first.weight[:kept].T + first.bias[:kept]) * (8 / kept))
    expected = hidden @ second.weight[:, :kept].T + second.bias  # the classifier keeps its scale
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_full_width_has_no_scaler():
    model, batch = mlp_model(), vectors(6).take(torch.arange(6))
    method = HeteroFL()
    task = task_of(method, model, "a")
    assert bits(method.forward(task.patch.values, task.patch.cut, batch, task, model)) == bits(
        model.module(batch[0])
    )


def test_the_scaler_is_folded_into_what_is_evaluated():
    """Without norms the trained small network has the factor; a switch of the setting alone changes what is judged."""
    model, data, fleet = mlp_model(), vector_data(), fleet_by_name("a1-e1")
    state = run(HeteroFL(), model, data, fleet).state
    with_factor, without = (
        evaluate_tiers(setup_of(HeteroFL(scaler=on), model, data, fleet), state, fleet.tiers).tiers
        for on in (True, False)
    )
    assert with_factor["e"] != without["e"]
    assert with_factor["a"] == without["a"]  # the full width has no factor
    task = task_of(HeteroFL(), model, "e")
    batch = data.test.take(torch.arange(4))
    trained = HeteroFL().forward(task.patch.values, task.patch.cut, batch, task, model)
    deployed = HeteroFL().as_deployed(HeteroFL().init(model), task.patch, model)
    torch.testing.assert_close(model.forward(deployed.values, deployed.cut, batch), trained)
    plain = model.forward(task.patch.values, task.patch.cut, batch)
    scaled = model.forward(task.patch.values, task.patch.cut, batch, mode="eval", scale={"0": 2.0})
    assert bits(plain) == bits(
        scaled
    )  # factors belong to training; what is evaluated has them in its weights


# Labels


def labelled(counts: dict[int, list[int]]) -> tuple[Examples, list[int]]:
    """Examples whose labels are those of the clients, in order."""
    labels = torch.tensor([label for owned in counts.values() for label in owned])
    generator = torch.Generator().manual_seed(0)
    return Examples.of(torch.randn(len(labels), 5, generator=generator), labels), [
        len(owned) for owned in counts.values()
    ]


OWNED = {0: [0, 1, 0, 1], 1: [1, 1, 1, 1], 2: [0, 3, 3, 0]}  # nobody owns label 2


def owned_data():
    examples, sizes = labelled(OWNED)
    return federated(examples, sizes, test=vectors(8))


def test_rows_of_labels_that_nobody_owns_keep_their_bits():
    model, data = mlp_model(), owned_data()
    method = HeteroFL(LocalTraining(momentum=0.9, weight_decay=0.1))  # decay moves every row on the client
    merged = run(method, model, data, "a1", rounds=3).state.weights
    for name in ("2.weight", "2.bias"):
        assert bits(merged[name][2]) == bits(model.weights()[name][2])
        for row in (0, 1, 3):
            assert bits(merged[name][row]) != bits(model.weights()[name][row])


def test_rows_are_merged_over_the_clients_that_own_them():
    model, data, method = mlp_model(), owned_data(), HeteroFL()
    updates = [
        method.perform(task_of(method, model, "a", number, 4), data.client(number), model) for number in OWNED
    ]
    group = model.groups.outputs[0]
    assert [list(update.patch.cut.channels.get(group, range(CLASSES))) for update in updates] == [
        [0, 1],
        [1],
        [0, 3],
    ]
    assert [update.patch.values["2.bias"].shape[0] for update in updates] == [2, 1, 2]
    assert [update.patch.values["0.weight"].shape[0] for update in updates] == [8, 8, 8]
    merged = run(method, model, data, "a1").state.weights["2.weight"]
    first, second, third = (update.patch.values["2.weight"] for update in updates)
    assert bits(merged[3]) == bits(third[1])
    torch.testing.assert_close(merged[0], (first[0] + third[0]) / 2, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(merged[1], (first[1] + second[0]) / 2, rtol=1e-6, atol=1e-7)


def test_label_rows_stay_on_when_the_masked_loss_is_off():
    model, data = mlp_model(), owned_data()
    merged = run(HeteroFL(masked_loss=False), model, data, "a1").state.weights
    assert bits(merged["2.bias"][2]) == bits(model.weights()["2.bias"][2])
    both_off = run(HeteroFL(**PLAIN), model, data, "a1").state.weights
    assert bits(both_off["2.bias"][2]) != bits(model.weights()["2.bias"][2])


def test_the_masked_loss_alone_sends_all_rows_and_moves_only_owned_ones():
    model, data = mlp_model(), owned_data()
    method = HeteroFL(label_rows=False)
    update = method.perform(task_of(method, model, "a", 1, 4), data.client(1), model)
    assert update.patch.values["2.bias"].shape == (CLASSES,)
    moved = (update.patch.values["2.bias"] != model.weights()["2.bias"]).tolist()
    assert moved == [False, True, False, False]


def test_local_training_minimises_the_masked_loss():
    model, data = mlp_model(), owned_data()
    method = HeteroFL(LocalTraining(lr=0.3))
    update = method.perform(task_of(method, model, "a", 0, 4), data.client(0), model)
    inputs, labels = data.client(0).take(torch.arange(4))
    module = tiny_mlp()
    masked = torch.where(torch.tensor([True, True, False, False]), module(inputs), 0.0)
    loss = cross_entropy(masked, labels)
    loss.backward()
    assert update.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    expected = module[0].weight - 0.3 * module[0].weight.grad
    torch.testing.assert_close(update.patch.values["0.weight"], expected.detach(), rtol=1e-5, atol=1e-6)


def test_reported_accuracy_is_that_of_all_classes():
    """The mask belongs to local training; the tiers' figures are the paper's "global" ones."""
    model, data = mlp_model(), owned_data()
    result = run(HeteroFL(), model, data, "a1")
    module = tiny_mlp()
    module.load_state_dict({name: result.state.weights[name] for name in module.state_dict()})
    inputs, labels = data.test.take(torch.arange(8))
    assert result.records[-1].tiers["a"]["loss"] == pytest.approx(
        cross_entropy(module(inputs), labels).item(), abs=1e-6
    )


def test_a_model_with_two_outputs_needs_both_label_settings_off():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 4)

        def forward(self, x):
            hidden = self.body(x).relu()
            return torch.cat([self.one(hidden), self.two(hidden)], dim=1)

    model = elastic(TwoHeads(), vectors(2).take(torch.arange(2)))
    for refuses in (HeteroFL().check_task, lambda model: task_of(HeteroFL(), model)):
        with pytest.raises(FedtailorError, match="need one output axis of classes, this model has 2"):
            refuses(model)
    HeteroFL(**PLAIN).check_task(model)
    assert task_of(HeteroFL(**PLAIN), model).lease.partial == frozenset()


def test_the_lease_allows_missing_rows_only_where_label_rows_are_on():
    model = mlp_model()
    assert task_of(HeteroFL(), model).lease.partial == {model.groups.outputs[0]}
    assert task_of(HeteroFL(label_rows=False), model).lease.partial == frozenset()


# Normalisation


def test_statistics_are_measured_after_training_and_never_uploaded():
    method, model, data = HeteroFL(), cnn_model(), image_data()
    update = method.perform(task_of(method, model, "b"), data.client(0), model)
    assert not {name.partition("@")[0] for name in update.patch.values} & set(model.statistics)
    merged = run(method, model, data, "a1-e1").state.weights
    for name in model.statistics:
        assert bits(merged[name]) == bits(model.weights()[name])  # the module's own are left alone
        assert {f"{name}@1", f"{name}@1/16"} <= merged.keys()


def test_the_tiers_run_on_their_own_statistics():
    method, model, data = HeteroFL(), cnn_model(16, 16), image_data()
    state = run(method, model, data, "a1-e1").state
    for width in ("1", "1/16"):
        (patch,) = method.deploy(state, Budget(width=width), model).patches
        for name in model.statistics:
            assert bits(patch.values[name]) == bits(state.weights[f"{name}@{width}"])


def test_every_level_learns():
    """Not a benchmark: after a few rounds all levels find the bright corner of each class."""
    data = federated(images(96), (32,) * 3, test=images(80, seed=9))
    method = HeteroFL(LocalTraining(lr=0.3, batch_size=8, epochs=2, clip_norm=1.0, momentum=0.5))
    tiers = run(method, cnn_model(8, 16), data, "a1-b1-c1", rounds=5).records[-1].tiers
    assert min(tier["accuracy"] for tier in tiers.values()) > 0.45  # chance is 0.25
