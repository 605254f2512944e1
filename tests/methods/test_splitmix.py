"""Split-Mix: independent base networks, a shared cycle, ensembles by budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedtailor.client.evaluate import mean_output
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.splitmix import SplitMix, by_base, choose_bases, named
from fedtailor.seeds import Seeds
from helpers import bits, client, cnn_model, differing, image_data, mlp_model, run, vector_data

LOCAL = LocalTraining(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)


def test_one_base_of_full_width_is_fedavg_bit_for_bit():
    model, data = cnn_model(), image_data((6, 9, 4))
    ours = run(SplitMix(LOCAL, base=1), model, data, rounds=3).state.weights
    plain = run(FedAvg(LOCAL), model, data, rounds=3).state.weights
    assert not differing(by_base(ours)[0], plain)


def test_bases_share_no_parameter_and_start_differently():
    model = cnn_model(first=8, second=8)
    parts = by_base(SplitMix(base=0.25).init(model).weights)
    assert list(parts) == [0, 1, 2, 3]
    storages = [value.data_ptr() for part in parts.values() for value in part.values()]
    assert len(set(storages)) == len(storages)
    assert len({bits(part["4.weight"]) for part in parts.values()}) == 4
    assert {tuple(part["4.weight"].shape) for part in parts.values()} == {(2, 2, 3, 3)}


def test_every_base_comes_first_once_in_a_cycle():
    seeds = Seeds(3)
    for start in (0, 8, 16):
        firsts = [choose_bases(8, 1, draw, client(draw), 0, seeds) for draw in range(start, start + 8)]
        assert sorted(base for (base,) in firsts) == list(range(8))


def test_after_one_cycle_of_single_base_clients_each_base_was_trained_exactly_once():
    """Four clients that can afford one base each, four bases: one round is one cycle."""
    model, data = mlp_model(), vector_data((6,) * 4)
    method = SplitMix(LOCAL, base=0.25)
    state = method.init(model)
    chosen = Counter()
    for slot in range(4):
        task = method.assign(state, replace(client(slot, width=0.25), slot=slot), model, Seeds(0))
        chosen.update(list(by_base(task.patch.values)))
    assert chosen == dict.fromkeys(range(4), 1)
    after = run(method, model, data, "equal-0.25").state
    assert len(differing(state.weights, after.weights)) == len(state.weights)
    assert after.memory["draws"] == 4


def test_the_cycle_goes_on_over_rounds():
    model, data = mlp_model(), vector_data((6, 6))
    method = SplitMix(LOCAL, base=0.25)
    start = method.init(model).weights
    one = run(method, model, data, "equal-0.25", rounds=1).state.weights
    two = run(method, model, data, "equal-0.25", rounds=2).state.weights
    touched_first = {name.rpartition("@")[2] for name in differing(start, one)}
    touched = {name.rpartition("@")[2] for name in differing(start, two)}
    assert len(touched_first) == 2
    assert len(touched) == 4
    assert not differing(
        {n: v for n, v in start.items() if n.rpartition("@")[2] not in touched_first},
        {n: v for n, v in one.items() if n.rpartition("@")[2] not in touched_first},
    )  # untouched bases keep their bits


def test_budget_pays_for_floor_r_over_rho_bases_in_exact_arithmetic():
    model = mlp_model(hidden=20)
    method = SplitMix(base=0.1)
    assert method.bases_for(Budget(width=0.3), model) == 3  # int(0.3 / 0.1) would be 2
    assert method.bases_for(Budget(width=1), model) == 10
    assert method.bases_for(Budget(width=0.25), model) == 2
    with pytest.raises(FedtailorError, match="below one base network"):
        method.bases_for(Budget(width=0.05), model)


def test_an_ensemble_answers_with_the_mean_of_its_logits():
    model, data = cnn_model(first=8, second=8), image_data((6, 6))
    method = SplitMix(LOCAL, base=0.25)
    state = run(method, model, data, rounds=2).state
    batch = data.example()
    deployed = method.deploy(state, Budget(width=0.75), model)
    assert len(deployed.patches) == 3
    each = [model.forward(patch.values, patch.cut, batch) for patch in deployed.patches]
    assert torch.equal(mean_output(model, deployed.patches, batch), torch.stack(each).mean(0))
    assert (
        method.deploy(state, Budget(width=0.25), model).patches[0].values.keys()
        == by_base(state.weights)[0].keys()
    )


def test_work_and_bytes_grow_with_the_number_of_bases():
    model = mlp_model(hidden=8)
    method = SplitMix(base=0.25)
    state = method.init(model)
    one, three = (method.assign(state, client(width=width), model, Seeds(0)) for width in (0.25, 0.75))
    assert method.work(three, model).macs == 3 * method.work(one, model).macs
    assert three.patch.nbytes == 3 * one.patch.nbytes


@pytest.mark.parametrize(
    ("base", "words"), [(0.3, "1 over a whole number"), (0, "above 0"), (2, "at most 1")]
)
def test_bad_base_is_named(base, words):
    with pytest.raises(FedtailorError, match=words):
        SplitMix(base=base)


def test_names_round_trip():
    values = {"a.weight": torch.ones(2), "a@b.weight": torch.zeros(1)}
    assert by_base(named(values, 12)) == {12: values}
