"""The one place where a record is made: what of a round goes into which field."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.record import Covered
from fedtailor.server.recording import covered
from helpers import cnn_model, image_data, mlp_model, run, update_of, vector_data


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
