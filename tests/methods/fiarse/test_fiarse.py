"""FIARSE: what is exact in the paper. Pieces, the threshold-controlled gradient, the merge, FedAvg; and channels."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import fedtailor
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.messages import Client, ServerState, Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fiarse.fiarse import FIARSE
from fedtailor.methods.fiarse.magnitude import gate, importance
from fedtailor.methods.pruning import prunable
from fedtailor.seeds import Seeds
from fedtailor.storage.sparse_file import load_sparse
from helpers import (
    bits,
    cnn_model,
    differing,
    held_mask,
    image_data,
    images,
    mlp_model,
    run,
    tiny_cnn,
    tiny_mlp,
    vector_data,
    vectors,
)

LOCAL = LocalTraining(lr=0.1, batch_size=4, momentum=0.9, weight_decay=0.01)
ONE_STEP = LocalTraining(lr=1.0, batch_size=6, steps=1)  # with rate 1 the step is the gradient


def client_of(number: int = 0, **limits) -> Client:
    return Client(number, "tier", Budget(**limits), 6)


def task_of(rules: FIARSE, model: ElasticModel, state: ServerState | None = None, **limits) -> Task:
    return rules.assign(state or rules.init(model), client_of(**limits), model, Seeds(0))


def doubled(module: nn.Module, batch) -> ElasticModel:
    return elastic(module.double(), tuple(v.double() if v.is_floating_point() else v for v in batch))


def double_mlp() -> ElasticModel:
    return doubled(tiny_mlp(), vectors(2).take(torch.arange(2)))


def double_data():
    data = vector_data()
    inputs, labels = data.train.columns
    return replace(data, train=type(data.train).of(inputs.double(), labels))


def in_one_row(weights, model) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in prunable(model)])


@pytest.mark.parametrize("granularity", ["weights", "channels"])
@pytest.mark.parametrize("norm", ["averaged", "static"])
def test_with_all_at_full_size_it_is_fedavg_bit_for_bit(granularity, norm):
    model, data = cnn_model(), image_data((6, 5, 7, 4))
    ours = FIARSE(local=LOCAL, norm=norm, weighting="samples", granularity=granularity)
    ours = run(ours, model, data, "equal", rounds=3).state.weights
    theirs = run(FedAvg(local=LOCAL, norm=norm), model, data, "equal", rounds=3).state.weights
    assert not differing({n: ours[n] for n in model.trainable}, {n: theirs[n] for n in model.trainable})
    assert differing({n: ours[n] for n in model.trainable}, {n: model.weights()[n] for n in model.trainable})


# Which weights


@pytest.mark.parametrize("density", ["1/2", "1/4", "1/16", 0.3])
def test_the_mask_keeps_exactly_the_share_and_the_largest_of_all_layers(density):
    model, state = cnn_model(), FIARSE().init(cnn_model())
    cut = FIARSE().cut_for(state, Budget(density=density), model)
    total = len(in_one_row(state.weights, model))
    kept = torch.cat([cut.mask.of(name).reshape(-1) for name in prunable(model)])
    assert int(kept.sum()) == int(Fraction(str(density)) * total)
    magnitudes = in_one_row(state.weights, model).abs()
    assert magnitudes[kept].min() >= magnitudes[~kept].max()
    assert {name for name in model.trainable if name not in cut.mask.levels.maps} == {
        name for name in model.trainable if name not in prunable(model)
    }


def test_layerwise_the_share_holds_in_every_tensor():
    model, rules = cnn_model(), FIARSE(layerwise=True)
    cut = rules.cut_for(rules.init(model), Budget(density=0.25), model)
    for name in prunable(model):
        size, kept = model.weights()[name].abs(), cut.mask.of(name)
        assert abs(int(kept.sum()) - size.numel() / 4) < 1, name
        assert size[kept].min() >= size[~kept].max(), name


def test_of_equal_magnitudes_the_first_are_kept_and_exactly_as_many():
    model, rules = mlp_model(), FIARSE()
    state = rules.init(model)
    flat = {n: torch.ones_like(v) if n in prunable(model) else v for n, v in state.weights.items()}
    cut = rules.cut_for(replace(state, weights=flat), Budget(density=0.5), model)
    kept = torch.cat([cut.mask.of(name).reshape(-1) for name in prunable(model)])
    assert kept.tolist() == [True] * (len(kept) // 2) + [False] * (len(kept) - len(kept) // 2)


def test_pieces_follow_the_weights_and_those_of_one_round_are_nested():
    model, rules = cnn_model(), FIARSE(local=LOCAL)
    before = rules.init(model)
    after = run(rules, model, image_data(), "uniform-2", rounds=4).state
    old, new = (rules.cut_for(state, Budget(density=0.25), model).mask for state in (before, after))
    half = rules.cut_for(after, Budget(density=0.5), model).mask
    assert any(bool((old.of(n) != new.of(n)).any()) for n in prunable(model))
    assert all(bool((half.of(n) | ~new.of(n)).all()) for n in prunable(model))


def test_budgets_are_met_exactly_or_refused_in_a_sentence():
    model, rules = cnn_model(), FIARSE()
    state = rules.init(model)
    full = model.cost(Cut.everything())
    rest = full.params - len(in_one_row(state.weights, model))
    for limit in (full.params - 1, rest + 7, "50%"):
        cut = rules.cut_for(state, Budget(params=limit), model)
        assert model.cost(cut).params == (full.params // 2 if limit == "50%" else limit)
    narrow = model.cut(state.weights, prefix(model.groups, Fraction(3, 4))).values
    kept = rules.cut_for(state, Budget(width="3/4"), model).mask
    assert sum(map(kept.count, prunable(model))) == len(in_one_row(narrow, model))
    assert rules.cut_for(state, Budget(density=1), model) == Cut.everything()
    assert rules.cut_for(state, Budget(params=10**9), model) == Cut.everything()
    with pytest.raises(TooSmallError, match=f"it pays for no single weight beside the {rest} parameters"):
        rules.cut_for(state, Budget(params=rest), model)
    with pytest.raises(
        FedtailorError, match="does not keep to a limit on macs .*it honours width, params, density"
    ):
        rules.cut_for(state, Budget(macs=0.5), model)
    with pytest.raises(FedtailorError, match="density = 1/2: a cut keeps every weight of its channels"):
        FIARSE(granularity="channels").cut_for(state, Budget(density=0.5), model)
    with pytest.raises(FedtailorError, match="method.granularity = 'blocks': expected weights or channels"):
        FIARSE(granularity="blocks")


# The threshold-controlled gradient


def stepped(rules: FIARSE, task: Task, model: ElasticModel) -> dict[str, Tensor]:
    """What one step with rate 1 takes away from every tensor."""
    before = model.spread(task.patch).values
    after = model.spread(rules.perform(task, double_data().client(0), model).patch).values
    return {name: before[name] - after[name] for name in model.trainable}


def plain_gradient(weights: dict[str, Tensor], model: ElasticModel) -> dict[str, Tensor]:
    """dF/dv at v, by autograd alone."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    batch = double_data().client(0).take(torch.arange(6))
    output = torch.func.functional_call(model.module, leaves, batch[0])
    nn.functional.cross_entropy(output, batch[1]).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_the_gradient_of_single_weights_is_that_of_the_paper(layerwise, biased):
    """g * M * (1 + 2 theta |x| / (|x| + theta)^2), with g from autograd and the rest written out."""
    model = double_mlp()
    rules = FIARSE(local=ONE_STEP, layerwise=layerwise, biased_gradient=biased)
    task = task_of(rules, model, density=0.5)
    x = model.spread(task.patch).values
    g, taken = plain_gradient(x, model), stepped(rules, task, model)
    smallest = min(float(x[n][x[n] != 0].abs().min()) for n in prunable(model))
    for name in model.trainable:
        expected = g[name]
        if name in prunable(model):
            size, kept = x[name].abs(), x[name] != 0
            theta = float(size[kept].min()) if layerwise else smallest
            factor = 1 + 2 * theta * size / (size + theta) ** 2 if biased else 1
            expected = g[name] * kept * factor
            assert not bool(taken[name][~kept].any())
        torch.testing.assert_close(taken[name], expected, rtol=1e-10, atol=1e-12)


def test_the_gate_is_steep_at_the_threshold_flat_far_above_and_shut_below():
    sizes = torch.tensor([0.5, 1.0, 3.0, 1e6], dtype=torch.float64, requires_grad=True)
    passed = gate(sizes, torch.tensor(1.0, dtype=torch.float64))
    passed.sum().backward()
    assert passed.tolist() == [0, 1, 1, 1]
    assert sizes.grad.tolist() == pytest.approx(
        [0, 0.5, 2 / 16, 0], abs=1e-9
    )  # times |x|: 0.5 at the threshold
    none = torch.tensor([0.0, 2.0], requires_grad=True)
    gate(none, torch.tensor(0.0)).sum().backward()
    assert none.grad.tolist() == [0, 0]  # at full size nothing is bent, and 0 / 0 is not met


def test_a_weight_that_falls_below_its_threshold_is_out_and_rests_until_the_round_ends():
    model, data = double_mlp(), double_data()
    rules = FIARSE(local=LocalTraining(lr=1.0, batch_size=6, steps=1))
    task = task_of(rules, model, density=0.5)
    once = model.spread(rules.perform(task, data.client(0), model).patch).values
    longer = FIARSE(local=LocalTraining(lr=1.0, batch_size=6, steps=3))
    thrice = model.spread(longer.perform(task, data.client(0), model).patch).values
    sent = model.spread(task.patch).values
    theta = min(float(sent[n][sent[n] != 0].abs().min()) for n in prunable(model))
    fallen = {n: (sent[n] != 0) & (once[n].abs() < theta) for n in prunable(model)}
    assert sum(int(each.sum()) for each in fallen.values()) > 0
    for name, each in fallen.items():
        assert bits(once[name][each]) == bits(thrice[name][each])
    assert any(bool((once[n] != thrice[n]).any()) for n in prunable(model))


def test_zeros_that_are_left_out_stay_zeros_where_the_threshold_is_zero():
    """A model with more zeros than a mask leaves out has theta = 0, which every magnitude reaches."""
    model, rules = mlp_model(), FIARSE(local=LOCAL)
    state = rules.init(model)
    empty = {n: torch.zeros_like(v) if n in prunable(model) else v for n, v in state.weights.items()}
    task = task_of(rules, model, replace(state, weights=empty), density=0.5)
    prepared = rules.prepare(task, vector_data().client(0), model)
    held = {n: v.clone().requires_grad_() for n, v in prepared.patch.values.items()}
    batch = vector_data().client(0).take(torch.arange(6))
    output = rules.forward(held, prepared.patch.cut, batch, prepared, model)
    model.objective.loss(output, batch).backward()
    for name in prunable(model):
        assert not bool(held[name].grad[~task.lease.cut.mask.of(name)].any())
        assert bool(held[name].grad.isfinite().all())


# Merging, and what it costs


def test_every_weight_is_the_mean_over_those_that_held_it():
    model, rules, data = cnn_model(), FIARSE(local=LOCAL), image_data()
    state = rules.init(model)
    clients = [client_of(0, density="1/8"), client_of(1, density="1/2"), client_of(2, density="1/2")]
    tasks = [rules.assign(state, each, model, Seeds(0)) for each in clients]
    updates = [rules.perform(task, data.client(n), model) for n, task in enumerate(tasks)]
    merged = rules.merge(state, updates, model).weights
    held_by = torch.zeros(4)
    for name in prunable(model):
        values = torch.stack([model.spread(update.patch).values[name] for update in updates]).double()
        held = torch.stack([held_mask(model, task.lease.cut, name) for task in tasks])
        count = held.sum(0)
        mean = ((values * held).sum(0) / count.clamp(min=1)).float()
        assert torch.equal(merged[name], torch.where(count > 0, mean, state.weights[name])), name
        held_by += torch.bincount(count.reshape(-1), minlength=4)
    assert held_by[0] > 0
    assert held_by[1] == 0  # nested: what the smallest holds, all hold
    assert held_by[2] > 0
    assert held_by[3] > 0


def test_a_client_pays_dense_macs_and_is_sent_its_values_and_a_byte_for_every_weight():
    model, rules = cnn_model(), FIARSE(local=LOCAL)
    task = task_of(rules, model, density="1/4")
    total = len(in_one_row(model.weights(), model))
    rest = sum(v.numel() for n, v in model.weights().items() if n in model.trainable) - total
    assert task.nbytes == 4 * (total // 4 + rest) + total
    assert rules.perform(task, image_data().client(0), model).patch.nbytes == 4 * (total // 4 + rest)
    assert rules.work(task, model).macs == 3 * model.cost(Cut.everything()).macs
    full = task_of(rules, model, density=1)
    assert full.nbytes == 4 * (total + rest)
    again = rules.assign(replace(rules.init(model), round=5), client_of(density="1/4"), model, Seeds(0))
    assert again.nbytes == task.nbytes  # magnitudes move: the map is sent every time


def test_a_sparse_file_of_a_finished_run_has_the_deployed_weights(tmp_path):
    fleet = Fleet(tuple(Tier(str(d), Budget(density=d), Fraction(1)) for d in (0.25, 1)))
    run = fedtailor.train(
        tiny_cnn(), image_data(), fleet, FIARSE(local=LOCAL), rounds=2, seed=0, engine={"workers": 0}
    )
    run.save_sparse(tmp_path / "small.sparse", Budget(density=0.25))
    loaded = load_sparse(tmp_path / "small.sparse")
    (patch,) = run.method.deploy(run.state, Budget(density=0.25), run.model).patches
    dense = run.model.spread(patch).values
    assert all(torch.equal(loaded[name], dense[name]) for name in prunable(run.model))
    total = len(in_one_row(run.state.weights, run.model))
    assert sum(int((loaded[name] != 0).sum()) for name in prunable(run.model)) == total // 4


# Channels


def means(weights, path: str) -> Tensor:
    """The mean magnitude of what makes each unit of a layer, written out."""
    weight, bias = weights[f"{path}.weight"], weights[f"{path}.bias"]
    return torch.cat([weight.flatten(1), bias[:, None]], dim=1).abs().mean(1)


def test_channels_of_largest_mean_magnitude_are_kept_as_many_as_of_a_width():
    model, rules = cnn_model(8, 12), FIARSE(granularity="channels")
    state = rules.init(model)
    for width in ("1/4", "1/2", "3/4"):
        size = prefix(model.groups, Fraction(width))
        cut = rules.cut_for(state, Budget(width=width), model)
        for path in ("0", "4"):
            (group,) = model.groups.producers[path]
            count = len(size.channels[group])
            best = means(state.weights, path).argsort(descending=True, stable=True)[:count]
            assert sorted(best.tolist()) == list(cut.channels[group]), (width, path)
        assert model.cost(cut) == model.cost(size)
        assert (cut.tag, cut.width) == (size.tag, size.width)
    assert rules.cut_for(state, Budget(width="1/2"), model) != prefix(model.groups, Fraction(1, 2))


def test_importance_at_a_cut_is_that_of_what_is_held():
    model = cnn_model(8, 12)
    weights = model.weights()
    cut = FIARSE(granularity="channels").cut_for(ServerState(0, weights), Budget(width="1/2"), model)
    found = model.units.by_group(importance(model.cut(weights, cut).values, cut, model).numpy())
    (first,), (second,) = model.groups.producers["0"], model.groups.producers["4"]
    rows, columns = list(cut.channels[second]), list(cut.channels[first])
    parts = {"4.weight": weights["4.weight"][rows][:, columns], "4.bias": weights["4.bias"][rows]}
    assert found[second][rows].tolist() == pytest.approx(means(parts, "4").tolist(), rel=1e-6)
    assert not found[second][[unit for unit in range(12) if unit not in rows]].any()


def test_the_gradient_of_channels_is_that_of_gates_on_what_reads_them():
    """Of the gated loss F(w2 * M(a(w1, b1))), a being mean magnitudes: autograd with the slope of M written out."""
    model = double_mlp()
    rules = FIARSE(local=ONE_STEP, granularity="channels")
    task = task_of(rules, model, width="1/2")
    x, taken = task.patch.values, stepped(rules, task, model)
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    batch = double_data().client(0).take(torch.arange(6))
    sizes = means(leaves, "0")
    theta = sizes.detach().min()
    # A straight line through the point with the slope 2 theta / (a + theta)^2, where its value is 1
    slope = 2 * theta / (sizes.detach() + theta) ** 2
    gates = 1 + slope * (sizes - sizes.detach())
    hidden = torch.relu(batch[0] @ leaves["0.weight"].T + leaves["0.bias"]) * gates
    output = hidden @ leaves["2.weight"].T + leaves["2.bias"]
    nn.functional.cross_entropy(output, batch[1]).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(taken[name], leaf.grad, rtol=1e-10, atol=1e-12)
    plain = stepped(replace(rules, biased_gradient=False), task, model)
    assert not torch.allclose(plain["0.weight"], taken["0.weight"])
    torch.testing.assert_close(plain["2.weight"], taken["2.weight"])


def test_a_deployed_piece_is_a_small_module_that_computes_what_the_masked_model_computes():
    model = doubled(tiny_cnn(8, 12), images(2).take(torch.arange(2)))
    rules = FIARSE(granularity="channels", norm="averaged")
    state = rules.init(model)
    (patch,) = rules.deploy(state, Budget(width="1/4"), model).patches
    small = model.build(patch).eval()
    assert [tuple(small[place].weight.shape) for place in (0, 4, 8)] == [(2, 1, 3, 3), (3, 2, 3, 3), (4, 12)]
    gates = torch.zeros(model.units.total, dtype=torch.float64)
    for group, units in patch.cut.channels.items():
        gates[torch.tensor(list(units)) + model.units.slices[group].start] = 1
    masked = model.units.gated(state.weights, gates, Cut.everything())
    inputs = images(5).take(torch.arange(5))[0].double()
    expected = model.forward(masked, Cut.everything(), (inputs, torch.zeros(5, dtype=torch.long)))
    torch.testing.assert_close(small(inputs), expected, rtol=1e-10, atol=1e-10)


def test_what_is_trained_is_the_small_network_even_if_a_channel_loses_its_importance():
    model, rules = mlp_model(), FIARSE(granularity="channels", local=LOCAL)
    data = vector_data().client(0)
    task = rules.prepare(task_of(rules, model, width="1/2"), data, model)
    shrunk = {n: v * 0.01 for n, v in task.patch.values.items()}  # all below their thresholds
    batch = data.take(torch.arange(6))
    ours = rules.forward(shrunk, task.patch.cut, batch, task, model)
    assert torch.equal(ours, model.forward(shrunk, task.patch.cut, batch, mode="train"))


def test_clients_of_the_same_width_measure_the_norms_of_chosen_channels():
    """Which units a piece keeps is no prefix: clients are able by how many they hold."""
    model, rules = cnn_model(8, 12), FIARSE(granularity="channels", local=LOCAL)
    fleet = Fleet(tuple(Tier(str(w), Budget(width=w), Fraction(1)) for w in (0.25, 0.5)))
    seen = []

    class Watching:
        def __init__(self, inner):
            self.inner = inner

        def run(self, tasks):
            seen.extend(task for task in tasks if task.action == "calibrate")
            return self.inner.run(tasks)

    run(rules, model, image_data((6,) * 4), fleet, rounds=1, engine=Watching)
    asked = {tag: {task.client.id for task in seen if task.patch.cut.tag == tag} for tag in ("1/4", "1/2")}
    assert len(asked["1/4"]) == 4
    assert len(asked["1/2"]) == 2
