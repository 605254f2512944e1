"""OFA-FL: what is exact in the paper. Counts, nesting, rewinding, zeros that stay zeros, the joint loss, FedAvg."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Mask
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.messages import Client, ServerState
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.ofa_fl.ofa_fl import OFAFL
from fedtailor.methods.pruning import prunable
from fedtailor.seeds import Seeds
from helpers import bits, cnn_model, differing, image_data, mlp_model, run, snapshot, tiny_mlp, vector_data

RATIOS = (1, 0.8, 0.6, 0.4, 0.2)
LOCAL = LocalTraining(lr=0.1, batch_size=4, momentum=0.9, weight_decay=0.01)
FLEET = Fleet(tuple(Tier(str(r), Budget(density=r), Fraction(1)) for r in reversed(RATIOS)))


def method(**settings) -> OFAFL:
    return OFAFL(**{"local": LOCAL, "trigger": "schedule", "first": 0, "every": 1, **settings})


def noisy(model, seed: int = 3) -> dict:
    """Weights as if trained: unlike the module's own, with ties and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    moved = {
        n: v + torch.randn(v.shape, generator=generator) if n in model.trainable else v
        for n, v in model.weights().items()
    }
    return {n: (8 * v).round() / 8 if n in model.trainable else v for n, v in moved.items()}


def pruned(rules: OFAFL, model, events: int = 4) -> list[ServerState]:
    """The states after each event, with new weights before each of them."""
    states = [rules.init(model)]
    for event in range(events):
        before = replace(states[-1], round=event, weights=noisy(model, event))
        states.append(rules.begin(before, model))
    return states


def cut_at(rules: OFAFL, state: ServerState, density, model) -> Cut:
    return rules.cut_for(state, Budget(density=density), model)


@pytest.mark.parametrize("build", [mlp_model, cnn_model])
@pytest.mark.parametrize(
    "settings", [{}, {"layerwise": True}, {"pruning": "one-shot"}, {"pruning": "one-shot", "layerwise": True}]
)
def test_masks_are_nested_and_of_exactly_the_right_size(build, settings):
    model, rules = build(), method(**settings)
    state = pruned(rules, model)[-1]
    total = sum(model.weights()[name].numel() for name in prunable(model))
    cuts = [cut_at(rules, state, ratio, model) for ratio in RATIOS]
    for ratio, cut in zip(RATIOS[1:], cuts[1:], strict=True):
        assert sum(cut.mask.of(n).sum() for n in prunable(model)) == round(Fraction(str(ratio)) * total)
        assert sum(map(cut.mask.count, prunable(model))) == round(Fraction(str(ratio)) * total)
    for outer, inner in pairwise(cuts):
        assert outer.holds(inner)
        assert not inner.holds(outer)
        assert all(bool((outer.mask.of(n) | ~inner.mask.of(n)).all()) for n in prunable(model))


def test_the_layerwise_ratio_holds_in_every_tensor():
    model, rules = cnn_model(), method(layerwise=True)
    state = pruned(rules, model)[-1]
    for ratio in RATIOS[1:]:
        mask = cut_at(rules, state, ratio, model).mask
        for name in prunable(model):
            assert abs(mask.count(name) - ratio * model.weights()[name].numel()) < 1, name


def test_an_event_keeps_the_largest_magnitudes_of_the_previous_survivors():
    model, rules = mlp_model(), method(rewind=False)
    first, second = pruned(rules, model, 2)[1:]
    for state, before, ratio in ((first, None, 0.8), (second, first, 0.6)):
        mask = cut_at(rules, state, ratio, model).mask
        held = None if before is None else cut_at(rules, before, 0.8, model).mask
        inside, outside = [], []
        for name in prunable(model):
            size, kept = state.weights[name].abs(), mask.of(name)
            candidates = torch.ones_like(kept) if held is None else held.of(name)
            inside.append(size[kept])
            outside.append(size[candidates & ~kept])
        assert torch.cat(inside).min() >= torch.cat(outside).max()


@pytest.mark.parametrize("layerwise", [False, True])
def test_survivors_are_rewound_and_the_others_are_untouched(layerwise):
    model, rules = cnn_model(), method(layerwise=layerwise)
    states, initial = pruned(rules, model), model.weights()
    for event, state in enumerate(states[1:]):
        before = noisy(model, event)
        mask = cut_at(rules, state, RATIOS[event + 1], model).mask
        for name in prunable(model):
            kept = mask.of(name)
            assert bits(state.weights[name][kept]) == bits(initial[name][kept])
            assert bits(state.weights[name][~kept]) == bits(before[name][~kept])
        for name in model.trainable - set(prunable(model)):  # part of every network, so they survive too
            assert bits(state.weights[name]) == bits(initial[name])
    assert not differing(pruned(method(rewind=False), model, 1)[1].weights, noisy(model, 0))


def test_only_matrices_are_pruned():
    assert prunable(cnn_model()) == ("0.weight", "4.weight", "8.weight")


def client_task(rules: OFAFL, density, model, state=None, number: int = 0):
    state = state or pruned(rules, model)[-1]
    return rules.assign(state, Client(number, "t", Budget(density=density), 6), model, Seeds(0))


@pytest.mark.parametrize("density", RATIOS)
@pytest.mark.parametrize("joint", [True, False])
def test_pruned_weights_stay_exactly_0_with_momentum_and_decay(density, joint, monkeypatch):
    model, rules = cnn_model(), method(joint_loss=joint)
    task, data = client_task(rules, density, model), image_data().client(0)
    seen = []
    take = LocalSteps.take

    def watched(self, step, batch):
        loss = take(self, step, batch)
        seen.append({n: self.held[n].detach().clone() for n in prunable(model)})
        seen.append(
            {n: m.clone() for n in prunable(model) if (m := self.optimiser.rule.momenta[n]) is not None}
        )
        return loss

    monkeypatch.setattr(LocalSteps, "take", watched)
    update = rules.perform(task, data, model)
    assert len(seen) == 4
    for values in seen:
        for name, value in values.items():
            outside = ~task.lease.cut.mask.of(name)
            assert not bool(value[outside].any()), name
            assert bool(value[~outside].any()), name
    spread = model.spread(update.patch).values
    assert all(bits(spread[n]) == bits(seen[-2][n]) for n in prunable(model))
    assert all(
        update.patch.values[n].shape == (task.lease.cut.mask.count(n),) or density == 1
        for n in prunable(model)
    )


def test_training_the_packed_row_itself_gives_the_same():
    """The general local loop on packed values, which never has the zeros, is the slow reference."""
    model, rules = mlp_model(), method(joint_loss=False)
    task, data = client_task(rules, 0.4, model), vector_data().client(0)
    plain = FedAvg(local=LOCAL).perform(task, data, model)
    own = rules.perform(task, data, model)
    assert plain.patch.cut == own.patch.cut
    for name, value in own.patch.values.items():
        assert torch.allclose(value, plain.patch.values[name], rtol=0, atol=1e-6), name


def joint_value(rules, model, task, weights, batch) -> torch.Tensor:
    """The mean of the losses of all masked networks, written out."""
    losses = []
    for level in range(task.lease.cut.mask.level, 5):
        mask = Mask(task.lease.cut.mask.levels, level)
        masked = {n: v * mask.of(n) if n in prunable(model) else v for n, v in weights.items()}
        losses.append(model.objective.loss(torch.func.functional_call(model.module, masked, batch[0]), batch))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("density", RATIOS)
def test_the_gradient_is_the_mean_over_the_masks_by_finite_differences(density):
    model = mlp_model()
    module = model.module
    local = LocalTraining(lr=1.0, batch_size=6)
    rules = method(local=local)
    task = client_task(rules, density, model)
    data = vector_data().client(0)
    batch = tuple(v.double() if v.is_floating_point() else v for v in data.take(torch.arange(6)))
    start = {n: v.double() for n, v in model.spread(task.patch).values.items()}
    trained = model.spread(rules.perform(task, data, model).patch).values
    double = copy.deepcopy(module).double()
    wide = replace_module(model, double)
    for name, value in start.items():
        flat, step = value.reshape(-1), 1e-5
        gradient = torch.zeros_like(flat)
        for place in range(len(flat)):
            ends = []
            for sign in (1, -1):
                moved = flat.clone()
                moved[place] += sign * step
                weights = {**start, name: moved.view_as(value)}
                ends.append(joint_value(rules, wide, task, weights, batch))
            gradient[place] = (ends[0] - ends[1]) / (2 * step)
        taken = start[name] - trained[name].double()  # lr = 1: the step is the gradient
        assert torch.allclose(taken, gradient.view_as(value), rtol=0, atol=2e-6), name


def replace_module(model, module):
    """A view of the model with another module, for reference computations."""

    class View:
        objective = model.objective
        groups = model.groups
        trainable = model.trainable

    view = View()
    view.module = module
    return view


def test_clients_train_their_own_and_all_smaller_networks():
    model, rules = mlp_model(), method()
    for number, density in enumerate(RATIOS):
        task = client_task(rules, density, model)
        tags = [cut.tag for cut in rules.networks(task.lease.cut)]
        assert tags == ["1", "4/5", "3/5", "2/5", "1/5"][number:]
        full = model.cost(Cut.everything())
        assert rules.work(task, model).macs == 3 * full.macs * (5 - number)
        assert len(method(joint_loss=False).networks(task.lease.cut)) == 1


@pytest.mark.parametrize("norm", ["averaged", "static"])
def test_with_one_ratio_it_is_fedavg_bit_for_bit(norm):
    model, data = cnn_model(), image_data()
    ours = run(method(ratios=(1,), norm=norm), model, data, "equal", rounds=3).state.weights
    theirs = run(FedAvg(local=LOCAL, norm=norm), model, data, "equal", rounds=3).state.weights
    assert not differing({n: ours[n] for n in model.trainable}, {n: theirs[n] for n in model.trainable})
    assert differing({n: ours[n] for n in model.trainable}, {n: model.weights()[n] for n in model.trainable})


def test_only_clients_whose_ratio_is_supported_take_part():
    model = mlp_model()
    result = run(method(first=1, every=1), model, vector_data((4,) * 10), FLEET, rounds=6, every=1)
    assert [record.cohort.asked for record in result.records] == [2, 4, 6, 8, 10, 10]
    assert [len(record.method["supported"]) for record in result.records] == [1, 2, 3, 4, 5, 5]
    assert result.records[2].method["supported"] == ["1", "4/5", "3/5"]
    one_shot = method(first=2, pruning="one-shot", rewind=False, joint_loss=False)
    rows = run(one_shot, model, vector_data((4,) * 10), FLEET, rounds=4, every=1).records
    assert [record.cohort.asked for record in rows] == [2, 2, 10, 10]


def test_bytes_are_survivors_and_rest_and_the_map_once_per_event_and_client():
    model = cnn_model()
    result = run(method(first=1, every=2), model, image_data((4,) * 10), FLEET, rounds=10, every=100)
    sizes = {n: v.numel() for n, v in model.weights().items() if n in model.trainable}
    total = sum(sizes[n] for n in prunable(model))
    rest = sum(sizes.values()) - total
    for number, record in enumerate(result.records):
        depth = min(4, (number + 1) // 2)
        held = [round(Fraction(str(ratio)) * total) + rest for ratio in RATIOS[: depth + 1] for _ in range(2)]
        fresh = depth > 0 and number == 2 * depth - 1
        assert record.training.bytes_up == 4 * sum(held)
        assert record.training.bytes_down == 4 * sum(held) + fresh * len(held) * total


def test_without_the_joint_loss_the_full_network_needs_no_map():
    model = mlp_model()
    state = pruned(method(joint_loss=False), model, 1)[-1]
    assert client_task(method(joint_loss=False), 1, model, state).levels is None
    assert client_task(method(joint_loss=False), 0.8, model, state).levels is not None
    assert client_task(method(), 1, model, state).levels is not None


def test_convergence_is_patience_evaluations_without_improvement():
    model, rules = mlp_model(), method(trigger="convergence", tolerance=0.1, patience=2)
    state = rules.init(model)
    for loss, depth in (
        (1.0, 0),
        (0.8, 0),
        (0.75, 0),
        (0.71, 0),
        (0.85, 0),
        (0.9, 1),
        (5.0, 1),
        (6.0, 1),
        (6.0, 2),
    ):
        state = rules.begin(rules.observe(state, {"small": {"loss": loss}, "large": {"loss": 0.0}}), model)
        assert state.memory["depth"] == depth, loss
    assert method(trigger="schedule", first=9).begin(rules.init(model), model).memory["depth"] == 0


def test_budgets_choose_the_largest_ratio_that_they_pay_for():
    model, rules = cnn_model(), method()
    total = sum(model.weights()[n].numel() for n in prunable(model))
    full = model.cost(Cut.everything()).params
    assert [rules.number(Budget(density=d), model) for d in (1, 0.99, 0.6, 0.2)] == [0, 1, 2, 4]
    least = full - total + round(Fraction(2, 5) * total)
    assert [rules.number(Budget(params=p), model) for p in (full, full - 1, least, least - 1)] == [0, 1, 3, 4]
    assert rules.number(Budget(params="100%"), model) == 0
    state = pruned(rules, model)[-1]
    for width in (0.75, 0.9, 1):
        cut = rules.cut_for(state, Budget(width=width), model)
        assert (
            model.cost(cut).params
            <= model.cost(
                FedAvg(width=width).cut_for(FedAvg(width=width).init(model), Budget(), model)
            ).params
        )
    with pytest.raises(FedtailorError, match="no ratio of method.ratios fits it; the smallest is 1/5"):
        rules.cut_for(rules.init(model), Budget(density=0.1), model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratios": (0.8, 0.4)}, "method.ratios"),
        ({"ratios": (1, 0.4, 0.4)}, "1 and then smaller ratios"),
        ({"ratios": ()}, "method.ratios"),
        ({"pruning": "slow"}, "method.pruning = 'slow': expected progressive or one-shot"),
        ({"trigger": "never"}, "method.trigger"),
        ({"tolerance": -1}, "method.tolerance"),
        ({"patience": 0}, "method.patience"),
        ({"first": -1}, "method.first"),
        ({"every": 0}, "method.every"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(FedtailorError, match=message):
        OFAFL(**settings)


def test_what_is_deployed_is_the_masked_network_and_costs_what_survives():
    model, rules = cnn_model(), method(norm="averaged")
    state = pruned(rules, model)[-1]
    (patch,) = rules.deploy(state, Budget(density=0.4), model).patches
    module = model.build(patch)
    for name in prunable(model):
        expected = state.weights[name] * patch.cut.mask.of(name)
        assert torch.equal(module.get_parameter(name), expected)
    cost, full = model.cost(patch.cut), model.cost(Cut.everything())
    total = sum(model.weights()[n].numel() for n in prunable(model))
    assert full.params - cost.params == total - round(Fraction(2, 5) * total)
    assert full.bytes - cost.bytes == 4 * (full.params - cost.params)
    assert cost.macs == full.macs


def test_the_module_is_never_written_to():
    model = mlp_model()
    before = snapshot(model.weights())
    run(method(first=1, every=1), model, vector_data((4,) * 10), FLEET, rounds=5)
    assert snapshot(model.weights()) == before == snapshot(dict(tiny_mlp().named_parameters()))
