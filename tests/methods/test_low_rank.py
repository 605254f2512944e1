"""HetLoRA and FlexLoRA: the papers' arithmetic by hand, what they have in common with FedAvg, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import ServerState, Update
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.low_rank.flexlora import FlexLoRA
from fedtailor.methods.low_rank.hetlora import HetLoRA, pruned
from fedtailor.methods.low_rank.products import split
from fedtailor.seeds import Seeds
from helpers import adapted_model, client, cnn_model, differing, image_data, images, run, update_of
from odd_networks import LowRank

UP, DOWN = "0.up.weight", "0.down.weight"
PLAIN = {"sparsity_weights": False, "self_pruning": False}


def layer(inputs: int = 2, outputs: int = 2, rank: int = 2) -> ElasticModel:
    with Seeds(1).scope("layer"):
        module = nn.Sequential(LowRank(inputs, outputs, rank))
    return elastic(module, (torch.ones(2, inputs), torch.tensor([0, 1])))


def update(model: ElasticModel, number: int, up: Any, down: Any, weight: float = 1.0) -> Update:
    """What a client of this rank sends."""
    values = {UP: torch.tensor(up), DOWN: torch.tensor(down)}
    rank = Fraction(values[UP].shape[1], model.shape(UP, prefix(model.groups, Fraction(1)))[1])
    return update_of(number, Patch(values, prefix(model.groups, rank)), weight)


def product(weights: dict[str, Tensor]) -> Tensor:
    return weights[UP].double() @ weights[DOWN].double()


# HetLoRA


def two_updates(model: ElasticModel) -> list[Update]:
    """Of rank 1 with ||B A|| = 2, and of rank 2 with ||B A|| = 5; the first has ten times the examples."""
    return [
        update(model, 0, [[1.0], [0.0]], [[2.0, 0.0]], weight=10),
        update(model, 1, [[0.0, 1.0], [1.0, 0.0]], [[3.0, 0.0], [0.0, 4.0]], weight=1),
    ]


def test_hetlora_pads_with_zeros_and_weighs_by_the_norm_of_the_product():
    model = layer()
    method = HetLoRA()
    after = method.merge(method.init(model), two_updates(model), model).weights
    torch.testing.assert_close(after[UP], torch.tensor([[2 / 7, 5 / 7], [5 / 7, 0.0]]))
    torch.testing.assert_close(after[DOWN], torch.tensor([[(2 * 2 + 5 * 3) / 7, 0.0], [0.0, 5 * 4 / 7]]))


def test_without_its_weights_examples_count_and_without_padding_those_who_hold_a_rank():
    model = layer()
    method = HetLoRA(sparsity_weights=False)
    after = method.merge(method.init(model), two_updates(model), model).weights
    torch.testing.assert_close(after[UP], torch.tensor([[10 / 11, 1 / 11], [1 / 11, 0.0]]))
    after = replace(method, zero_padding=False).merge(method.init(model), two_updates(model), model).weights
    torch.testing.assert_close(after[UP], torch.tensor([[10 / 11, 1.0], [1 / 11, 0.0]]))


def test_a_rank_that_nobody_sent_keeps_its_bits():
    model = layer()
    method = HetLoRA()
    before = method.init(model)
    after = method.merge(before, two_updates(model)[:1], model).weights
    assert torch.equal(after[UP][:, 1], before.weights[UP][:, 1])
    assert torch.equal(after[UP][:, 0], torch.tensor([1.0, 0.0]))


def test_clients_that_learnt_nothing_count_by_their_examples():
    model = layer()
    nothing = [update(model, number, [[0.0, 0.0], [0.0, 0.0]], [[1.0 + number] * 2] * 2, weight=1 + 2 * number)
               for number in range(2)]  # fmt: skip
    after = HetLoRA().merge(HetLoRA().init(model), nothing, model).weights
    assert torch.equal(after[DOWN], torch.full((2, 2), 1.75))


@pytest.mark.parametrize("settings", [PLAIN, {**PLAIN, "zero_padding": False}])
def test_with_equal_ranks_and_its_weights_off_it_is_fedavg_bit_for_bit(settings):
    data, local = image_data((6, 5, 7, 4)), LocalTraining(batch_size=4, momentum=0.9)
    ours, theirs = (
        run(method, adapted_model(), data, "equal", rounds=3, cohort=3).state.weights
        for method in (HetLoRA(local=local, **settings), FedAvg(local=local))
    )
    assert differing(ours, theirs) == set()


def test_a_device_is_sent_the_first_ranks_and_nothing_that_is_frozen():
    model = adapted_model()
    method = HetLoRA()
    state = method.init(model)
    small, whole = (method.assign(state, client(0, width), model, Seeds(0)).patch for width in ("1/4", 1))
    assert not model.frozen & whole.values.keys()
    for name, dim in (("2.up.weight", 1), ("2.down.weight", 0)):
        assert torch.equal(small.values[name], whole.values[name].narrow(dim, 0, 1))
    factors = [
        sum(patch.values[name].nbytes for name in ("2.up.weight", "2.down.weight"))
        for patch in (small, whole)
    ]
    assert 4 * factors[0] == factors[1]


def trained_update(model: ElasticModel, method: HetLoRA, state: ServerState) -> tuple[Any, Update]:
    task = method.assign(state, client(0, 1, examples=12), model, Seeds(0))
    return task, method.perform(task, images(12), model)


def test_a_client_whose_last_ranks_shrank_gives_them_up_and_is_sent_fewer_from_then_on():
    model = adapted_model()
    shrinking = HetLoRA(local=LocalTraining(lr=0.1, weight_decay=5.0, batch_size=4))
    state = shrinking.init(model)
    task, answer = trained_update(model, shrinking, state)
    assert answer.metrics["pruned"] == 1.0
    assert answer.patch.values["2.up.weight"].shape == (4, 3)  # floor(0.99 * 4)
    after = shrinking.merge(state, [answer], model)
    again = shrinking.assign(after, client(0), model, Seeds(0))
    assert again.patch.values["2.down.weight"].shape == (3, 16)
    assert shrinking.assign(after, client(1), model, Seeds(0)).patch.nbytes == task.patch.nbytes
    assert shrinking.notes(after, [answer], model) == {"clients that pruned": 1}


def test_a_client_whose_last_ranks_grew_keeps_them():
    model = adapted_model()
    method = HetLoRA(local=LocalTraining(lr=0.1, batch_size=4), regulariser=0.0)
    state = method.init(model)
    start = {**state.weights, "2.up.weight": torch.zeros(4, 4)}  # as an adapter starts
    _, answer = trained_update(model, method, replace(state, weights=start))
    assert answer.metrics["pruned"] == 0.0
    assert answer.patch.values["2.up.weight"].shape == (4, 4)


def test_the_regulariser_is_the_norms_of_the_last_ranks_multiplied():
    model, batch = layer(rank=2), (torch.ones(2, 2), torch.tensor([0, 1]))
    values = {UP: torch.tensor([[1.0, 3.0], [1.0, 4.0]]), DOWN: torch.tensor([[1.0, 1.0], [6.0, 8.0]])}
    output, task = torch.zeros(2, 2), HetLoRA().assign(HetLoRA().init(model), client(0), model, Seeds(0))
    with_it = HetLoRA(regulariser=0.1).loss([output], [values], batch, task, model)
    without = HetLoRA(self_pruning=False).loss([output], [values], batch, task, model)
    assert float(with_it - without) == pytest.approx(0.1 * 5 * 10)


def test_pruning_ends_at_one_rank():
    model = layer(rank=2)
    one = pruned(model.groups, prefix(model.groups, Fraction(1)), 0.99)
    assert one.channels == {"0.down": range(1)}
    assert pruned(model.groups, one, 0.99) == one


# FlexLoRA


def test_flexlora_merges_products_and_not_factors():
    model = layer(inputs=5, outputs=4, rank=3)
    generator = torch.Generator().manual_seed(0)
    sent = [
        update(
            model, number, torch.randn(4, rank, generator=generator).tolist(),
            torch.randn(rank, 5, generator=generator).tolist(), weight=number + 1,
        )
        for number, rank in enumerate((1, 2))
    ]  # fmt: skip
    after = FlexLoRA().merge(FlexLoRA().init(model), sent, model).weights
    mean = sum(product(each.patch.values) * each.weight for each in sent) / 3
    torch.testing.assert_close(product(after), mean, rtol=1e-6, atol=1e-6)  # 1 + 2 ranks fit into 3


def test_what_a_device_is_given_is_the_best_approximation_of_its_rank():
    model = layer(inputs=6, outputs=5, rank=4)
    generator = torch.Generator().manual_seed(1)
    up, down = torch.randn(5, 4, generator=generator), torch.randn(4, 6, generator=generator)
    method = FlexLoRA()
    state = method.merge(method.init(model), [update(model, 0, up.tolist(), down.tolist())], model)
    whole = up.double() @ down.double()
    singular = torch.linalg.svdvals(whole)
    for rank in (1, 2, 3):
        small = method.assign(state, client(0, Fraction(rank, 4)), model, Seeds(0)).patch.values
        assert small[UP].shape == (5, rank)
        error = torch.linalg.norm(whole - product(small))
        assert float(error) == pytest.approx(float(torch.linalg.norm(singular[rank:])), rel=1e-5)
        torch.testing.assert_close(small[DOWN] @ small[DOWN].T, torch.eye(rank), rtol=1e-5, atol=1e-5)


def test_the_small_core_gives_the_decomposition_of_the_large_product():
    generator = torch.Generator().manual_seed(2)
    parts = [
        (
            torch.randn(7, r, generator=generator).double(),
            torch.randn(r, 9, generator=generator).double(),
            share,
        )
        for r, share in ((2, 0.25), (6, 0.75))
    ]
    whole = sum(share * up @ down for up, down, share in parts)
    up, down = split(parts, 3)
    u, s, vh = torch.linalg.svd(whole)
    torch.testing.assert_close(up @ down, (u[:, :3] * s[:3]) @ vh[:3])
    assert bool((down.gather(1, down.abs().argmax(dim=1, keepdim=True)) > 0).all())


def test_ranks_that_the_mean_does_not_have_add_nothing_and_can_be_learnt():
    model = layer(inputs=5, outputs=4, rank=3)
    state = FlexLoRA().init(model)
    after = (
        FlexLoRA().merge(state, [update(model, 0, [[1.0], [2.0], [0.0], [0.0]], [[1.0] * 5])], model).weights
    )
    assert not after[UP][:, 1:].any()
    assert torch.equal(after[DOWN][1:], state.weights[DOWN][1:])
    column = torch.tensor([[1.0], [2.0], [0.0], [0.0]]).double()
    torch.testing.assert_close(product(after), column.expand(4, 5))


# What they need


@pytest.mark.parametrize("method", [HetLoRA(), FlexLoRA()])
def test_a_model_without_adapters_is_refused_in_a_sentence(method):
    with pytest.raises(
        FedtailorError, match="trains low-rank adapters, and Sequential has none: expected layers"
    ):
        method.check_task(cnn_model())


def test_a_model_in_which_something_else_shrinks_is_refused_by_its_name():
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), LowRank(8, 4, 2))
    model = elastic(module, (torch.zeros(2, 5), torch.tensor([0, 1])))
    with pytest.raises(
        FedtailorError, match=r"cuts the ranks of adapters alone, and '0' can shrink too: name"
    ):
        HetLoRA().check_task(model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 1.0}, "method.decay = 1.0: expected above 0"),
        ({"regulariser": -1.0}, "method.regulariser = -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(FedtailorError, match=words):
        HetLoRA(**settings)
