from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import FedtailorError
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.registry import get_method, method_card, method_names, register
from fedtailor.seeds import Seeds
from helpers import (
    bits,
    client,
    cnn_model,
    differing,
    federated,
    held_mask,
    image_data,
    mlp_model,
    run,
    task_for,
    vector_data,
    vectors,
)

FULL_BATCH = LocalTraining(lr=0.5, batch_size=1000)


def test_clients_of_one_cut_are_sent_one_patch_of_one_state():
    """Workers are given tensors once that many clients share; another state, width or method has its own."""
    model, seeds = mlp_model(), Seeds(0)
    method, other = get_method("heterofl")(), FedAvg()
    state = method.init(model)

    def sent(method, state, number, width):
        return method.assign(state, client(number, width), model, seeds).patch

    first = sent(method, state, 0, 1)
    assert sent(method, state, 1, 1) is first
    assert sent(method, state, 2, "1/2") is not first
    assert sent(other, state, 3, 1) is not first
    assert sent(method, replace(state, weights=dict(state.weights)), 1, 1) is not first
    state.forget()
    assert sent(method, state, 1, 1) is not first


def test_one_client_gives_its_own_weights_exactly():
    method, model, data = FedAvg(LocalTraining(batch_size=4, momentum=0.9)), cnn_model(), image_data((9,))
    merged = run(method, model, data).state.weights
    task = method.assign(method.init(model), client(0, examples=9), model, Seeds(0))
    own = method.perform(task, data.client(0), model).patch.values
    assert merged.keys() == own.keys()
    assert differing(merged, own) == set()


def test_identical_clients_give_what_one_of_them_gives():
    """Full batches without remainder: the shuffle changes the order of a sum only; so the same client three times."""
    method, model, data = FedAvg(), mlp_model(), vector_data((6,))
    task = task_for(model, Cut.everything())
    update = method.perform(task, data.client(0), model)
    copies = [type(update)(n, 0, 0, update.patch, update.weight) for n in range(3)]
    merged = method.merge(method.init(model), copies, model)
    assert differing(merged.weights, update.patch.values) == set()
    assert merged.round == 1


def test_the_order_of_clients_changes_the_result_by_rounding_alone():
    examples, sizes, method, model = vectors(24), (4, 9, 6, 5), FedAvg(FULL_BATCH), mlp_model()
    data = federated(examples, sizes)
    other = FederatedData.from_examples(
        examples, examples, parts=[data.partition[number] for number in (2, 0, 3, 1)], num_classes=4
    )
    one, two = (run(method, model, part, rounds=3).state.weights for part in (data, other))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5), (2, 11, 4, 3)])
def test_one_full_batch_step_equals_one_step_of_centralised_descent(sizes):
    method, model, examples = FedAvg(FULL_BATCH), mlp_model(), vectors(20)
    merged = run(method, model, federated(examples, sizes)).state.weights
    module = copy.deepcopy(model.module)
    inputs, labels = examples.take(torch.arange(20))
    cross_entropy(module(inputs), labels).backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(merged[name], value.detach() - 0.5 * value.grad, rtol=1e-5, atol=1e-6)


def test_weights_are_renormalised_over_the_cohort():
    """With shares of all clients instead of the sampled ones the weights would shrink towards zero."""
    method, model, data = FedAvg(LocalTraining(lr=1e-12)), mlp_model(), vector_data((6,) * 6)
    merged = run(method, model, data, cohort=2).state.weights
    for name, value in model.weights().items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)


def test_clients_count_by_their_examples():
    method, model, data = FedAvg(FULL_BATCH), mlp_model(), vector_data((2, 6))
    state = method.init(model)
    updates = [
        method.perform(method.assign(state, one, model, Seeds(0)), data.client(one.id), model)
        for one in (client(0, examples=2), client(1, examples=6))
    ]
    assert [update.weight for update in updates] == [2, 6]
    merged = run(method, model, data).state.weights
    counted = run(FedAvg(FULL_BATCH, weighting="count"), model, data).state.weights
    for name, value in merged.items():
        first, second = (update.patch.values[name].double() for update in updates)
        torch.testing.assert_close(value.double(), (2 * first + 6 * second) / 8, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(counted[name].double(), (first + second) / 2, rtol=1e-7, atol=1e-9)


def test_an_empty_round_keeps_the_weights():
    method, model = FedAvg(), cnn_model()
    state = method.merge(method.init(model), [], model)
    assert state.round == 1
    assert differing(state.weights, model.weights()) == set()


def test_running_statistics_are_averaged_with_the_weights():
    method, model, data = FedAvg(), cnn_model(), image_data((6, 6))
    state = method.init(model)
    updates = [
        method.perform(method.assign(state, client(n, examples=6), model, Seeds(0)), data.client(n), model)
        for n in (0, 1)
    ]
    merged = run(method, model, data).state.weights
    for name in model.statistics:
        first, second = (update.patch.values[name] for update in updates)
        assert bits(first) != bits(model.weights()[name])
        torch.testing.assert_close(
            merged[name].double(), (first.double() + second.double()) / 2, rtol=1e-6, atol=1e-7
        )


# At a fixed small width for all


def test_a_small_width_is_the_same_for_every_budget():
    method, model = FedAvg(width="1/2"), cnn_model(4, 6)
    cuts = {method.cut_for(method.init(model), Budget(width=width), model) for width in ("1/16", "1/2", 1)}
    (cut,) = cuts
    assert sorted(len(units) for units in cut.channels.values()) == [2, 3]
    assert (
        method.cut_for(method.init(model), Budget(macs=100), model) == cut
    )  # even where it does not fit: FedAvg has no sub-models


def test_a_small_width_never_touches_the_rest():
    method, model, data = (
        FedAvg(LocalTraining(momentum=0.9, weight_decay=0.1), width="1/2"),
        cnn_model(),
        image_data(),
    )
    merged = run(method, model, data, "uniform-2", rounds=2).state.weights
    cut = method.cut_for(method.init(model), Budget(width=1), model)
    moved = 0
    for name, value in model.weights().items():
        outside = ~held_mask(model, cut, name)
        assert bits(merged[name][outside]) == bits(value[outside])
        moved += int((merged[name] != value).sum())
    assert moved > 100


def test_a_small_width_trains_as_a_small_network_does():
    """The same numbers as FedAvg at full width on the network that was cut out beforehand."""
    from fedtailor.elasticity.front_door import elastic

    wide, data = mlp_model(8), vector_data()
    method = FedAvg(LocalTraining(momentum=0.9, batch_size=4), width="3/8")
    cut = method.cut_for(method.init(wide), Budget(width=1), wide)
    small = elastic(wide.extract(wide.weights(), cut), wide.example)
    merged = run(method, wide, data, rounds=2).state.weights
    alone = run(FedAvg(LocalTraining(momentum=0.9, batch_size=4)), small, data, rounds=2).state.weights
    assert differing(wide.cut(merged, cut).values, alone) == set()


@pytest.mark.parametrize("width", [0, -1, 1.5, float("nan"), "x"])
def test_widths_that_are_none(width):
    with pytest.raises(FedtailorError, match="method.width = .*: expected a number above 0 and at most 1"):
        FedAvg(width=width)


def test_widths_are_exact():
    assert FedAvg(width=0.6000000000000001).width == Fraction(3, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": "avreaged"}, "unknown normalisation policy 'avreaged': did you mean 'averaged'?"),
        ({"weighting": "sample"}, "unknown weighting 'sample': did you mean 'samples'?"),
        ({"align": 0}, 'method.align = 0: expected a whole number of at least 1, or "auto"'),
    ],
)
def test_settings_of_every_method(settings, message):
    with pytest.raises(FedtailorError) as caught:
        FedAvg(**settings)
    assert str(caught.value).startswith(message)


def test_align_rounds_widths_up_to_a_multiple():
    method, model = FedAvg(width="1/4", align=2), cnn_model(4, 6)
    cut = method.cut_for(method.init(model), Budget(width=1), model)
    assert sorted(len(units) for units in cut.channels.values()) == [2, 2]


# The register


def test_known_names():
    assert {"fedavg", "heterofl"} <= set(method_names())
    assert method_names() == sorted(method_names())
    assert all(get_method(name).name == name for name in method_names())
    assert get_method("fedavg") is FedAvg
    assert FedAvg.name == "fedavg"


@pytest.mark.parametrize(
    ("wrong", "near"), [("fedavgg", "fedavg"), ("heterfl", "heterofl"), ("FedAvg", "fedavg")]
)
def test_misspelt_names_suggest_the_nearest(wrong, near):
    with pytest.raises(
        FedtailorError, match=f"unknown method '{wrong}': did you mean '{near}'.*fedavg.*heterofl"
    ):
        get_method(wrong)


def test_names_like_no_other_list_all():
    known = ", ".join(sorted([*method_names(), "auto"]))
    with pytest.raises(FedtailorError, match=f"unknown method 'zzz'; known: {known}"):
        get_method("zzz")


def test_a_name_that_is_taken_is_refused_and_says_by_whom():
    @dataclass(frozen=True)
    class Mine(Method):
        pass

    with pytest.raises(
        FedtailorError, match="'fedavg' is registered already, by fedtailor.methods.fedavg.FedAvg"
    ):
        register("fedavg")(Mine)
    assert get_method("fedavg") is FedAvg
    assert Mine.name == "Mine"


def test_a_class_of_the_same_name_from_elsewhere_is_a_duplicate_too():
    stranger = type("FedAvg", (Method,), {"__qualname__": "FedAvg", "__module__": "somebody.elses"})
    with pytest.raises(FedtailorError, match="is registered already"):
        register("fedavg")(stranger)
    assert get_method("fedavg") is FedAvg


@pytest.mark.parametrize("name", ["FedProx", "fed prox", "", "fed_prox", "-", "fed/prox", "fedprox!"])
def test_names_that_nobody_could_type_on_a_command_line(name):
    with pytest.raises(FedtailorError, match="expected lower-case letters, digits and hyphens"):
        register(name)(FedAvg)
    assert FedAvg.name == "fedavg"


def test_a_new_method_is_found_by_its_name(monkeypatch):
    import fedtailor.methods

    monkeypatch.setattr(fedtailor.methods.registry, "_METHODS", dict(fedtailor.methods.registry._METHODS))

    @register("fed-prox2")
    @dataclass(frozen=True)
    class Mine(Method):
        """What mine does."""

    assert get_method("fed-prox2") is Mine
    assert Mine.name == "fed-prox2"
    assert method_card("fed-prox2") == "What mine does."


def test_only_those_who_can_train_the_network_take_part():
    model, clients = cnn_model(), [client(number, width) for number, width in enumerate((0.2, 1, 0.5, 1))]
    small = replace(clients[0], id=4, budget=Budget(macs="100"))
    sparse = replace(small, id=5, budget=Budget(density=0.5))
    everyone = [*clients, small, sparse]

    def who(method: FedAvg) -> list[int]:
        return [each.id for each in method.participants(method.init(model), everyone, model)]

    assert who(FedAvg()) == [0, 1, 2, 3, 4, 5]
    assert who(FedAvg(only_able=True)) == [1, 3]
    assert who(FedAvg(only_able=True, width=0.5)) == [1, 2, 3]
    with pytest.raises(
        FedtailorError, match="method.only_able: no client's budget pays .* method.width = 1;"
    ):
        FedAvg(only_able=True).participants(FedAvg().init(model), [small], model)
