"""The one place where a record is made: what of a round goes into which field."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.fleet import fleet_by_name
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.record import Covered, Spent, TierSpent
from fedtailor.seeds import Seeds
from fedtailor.server.recording import covered
from helpers import cnn_model, image_data, mlp_model, run, update_of, vector_data, with_nan_inputs


def test_equal_coordinates_are_counted_together_whatever_their_tag():
    cuts = [
        Cut({"0": range(2)}, tag="1/2"),
        Cut({"0": range(2)}, tag="other"),
        Cut({"0": (1, 3)}),
        Cut({"0": range(2)}, absent=frozenset({"x"})),
    ]
    assert covered([update_of(number, Patch({}, cut)) for number, cut in enumerate(cuts)]) == (
        Covered(1, {"channels": {"0": 2}, "absent": ["x"]}),
        Covered(1, {"channels": {"0": "1,3"}}),
        Covered(2, {"channels": {"0": 2}}),
    )


def test_networks_of_an_ensemble_are_told_by_their_tags():
    (record,) = run(get_method("splitmix")(base="1/2"), cnn_model(), image_data((6, 6)), "equal").records
    assert sum(each.count for each in record.coverage) == 2
    assert all(each.tags for each in record.coverage)


@dataclass(frozen=True)
class Telling(Method):
    def notes(self, state, updates, model):
        return {"stage": "first", "pair": (1, 2), "clients": [update.client for update in updates]}


def test_what_a_method_says_is_as_it_will_be_read_back():
    (record,) = run(Telling(), mlp_model(), vector_data((6, 5))).records
    assert record.method == {"stage": "first", "pair": [1, 2], "clients": [0, 1]}
    assert json.loads(json.dumps(record.as_row()))["method"] == record.method


def test_a_prediction_costs_what_was_deployed_where_tiers_were_evaluated():
    method, model = get_method("fedavg")(), mlp_model()
    first, second = run(method, model, vector_data((6, 5)), rounds=2, every=2).records
    assert (first.tiers, first.deployed, first.best_round) == (None, {}, None)
    assert second.deployed == {"1": {"params": 5 * 8 + 8 + 8 * 4 + 4, "macs": (5 + 1) * 8 + (8 + 1) * 4}}
    assert second.best_round == 2


def test_clients_with_networks_of_their_own_have_no_common_cost():
    (record,) = run(get_method("feduniform")(), cnn_model(), image_data((6, 5)), "uniform-2").records
    assert record.tiers is not None
    assert record.deployed == {}


def test_nothing_is_named_twice():
    (record,) = run(Telling(), mlp_model(), vector_data((6, 5))).records
    row = replace(record, best_round=1).as_row()
    assert "stage" not in row
    assert len(row) == len(set(row)) == len({name.lower() for name in row})


@pytest.mark.parametrize("every", [1, 3])
def test_records_say_when_tiers_were_evaluated(every):
    records = run(Telling(), mlp_model(), vector_data((6, 5)), rounds=4, every=every).records
    assert [record.tiers is not None for record in records] == [n % every == 0 or n == 4 for n in range(1, 5)]


# What a client of one tier is sent of 5 -> 8 -> 4, and what a forward pass of it takes (a bias is an addition).
HALF, WHOLE = 5 * 4 + 4 + 4 * 4 + 4, 5 * 8 + 8 + 8 * 4 + 4
HALF_MACS, WHOLE_MACS = (5 + 1) * 4 + (4 + 1) * 4, (5 + 1) * 8 + (8 + 1) * 4


def test_what_each_tier_spent_is_counted_by_hand():
    (record,) = run(get_method("heterofl")(), mlp_model(), vector_data((6, 5, 7, 4)), "uniform-2").records
    examples = {"0.5": 6 + 5, "1": 7 + 4}  # the smaller devices come first
    epochs = get_method("heterofl")().local.examples_for(1)
    assert record.by_tier == {
        tier: TierSpent(
            bytes_down=2 * 4 * size,
            bytes_up=2 * 4 * size,
            macs=3 * macs * epochs * examples[tier],
            asked=2,
            answered=2,
            examples=epochs * examples[tier],
            parameters=2 * size,
        )
        for tier, size, macs in (("0.5", HALF, HALF_MACS), ("1", WHOLE, WHOLE_MACS))
    }
    assert record.training == sum(record.by_tier.values(), Spent())


def test_whoever_gives_no_update_was_sent_its_part_and_counts_for_nothing_else():
    data = with_nan_inputs(vector_data((6, 5, 7, 4)), 3)
    (record,) = run(get_method("heterofl")(), mlp_model(), data, "uniform-2").records
    top = record.by_tier["1"]
    assert (top.asked, top.answered, top.parameters) == (2, 1, 2 * WHOLE)
    assert (top.bytes_down, top.bytes_up) == (2 * 4 * WHOLE, 4 * WHOLE)
    assert top.macs == 3 * WHOLE_MACS * top.examples


def test_a_client_counts_in_the_tier_that_it_had_in_that_round():
    fleet = replace(fleet_by_name("uniform-2"), dynamic=True)
    data, rounds = vector_data((6,) * 6), 6
    records = run(get_method("heterofl")(), mlp_model(), data, fleet, rounds=rounds).records
    for number, record in enumerate(records):
        drawn = Counter(client.tier for client in fleet.capacity(data.sizes, number, Seeds(0)))
        assert {tier: spent.asked for tier, spent in record.by_tier.items()} == drawn
        held = {tier: spent.parameters // spent.asked for tier, spent in record.by_tier.items()}
        assert held.items() <= {"0.5": HALF, "1": WHOLE}.items()
    assert len({record.by_tier["1"].asked for record in records}) > 1


def test_parameters_are_those_that_were_sent_whatever_a_step_runs():
    """UniProb sends all of them, FLANC bases and coefficients; statistics of norms are none."""
    model, data = cnn_model(), image_data((6, 5))
    everything = sum(value.numel() for value in model.module.parameters())
    (record,) = run(get_method("uniprob")(), model, data, "uniform-2").records
    assert {spent.parameters for spent in record.by_tier.values()} == {everything}
    assert record.by_tier["0.5"].macs < record.by_tier["1"].macs / 2
    flanc = get_method("flanc")(widths="uniform-2")
    (record,) = run(flanc, model, data, "uniform-2").records
    state = flanc.init(model)
    for tier, tag in (("0.5", "1/2"), ("1", "1")):
        names = [name for name in state.weights if name.endswith(("@basis", f"@{tag}"))]
        held = sum(state.weights[name].numel() for name in names if plain(name) in model.parameters)
        assert record.by_tier[tier].parameters == held
