"""Of many clients a sample measures norms and evaluates: counted, fixed by the seed; where they are few, everyone."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.federated import FederatedData
from fedtailor.data.partitions import Partition
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.methods.registry import get_method
from fedtailor.run.arguments import fleet_of
from fedtailor.server.evaluation import calibrate
from fedtailor.server.faults import Timely
from fedtailor.server.inquiry import Inquiry
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import NormSettings, RoundSettings
from helpers import cnn_model, differing, image_data, images, setup_of

STATIC = get_method("heterofl")(local=LocalTraining(batch_size=4))


class Counting:
    """An engine that notes who was asked for what."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    def run(self, tasks):
        self.asked += [(task.action, task.client.id, task.client.tier) for task in tasks]
        return self.inner.run(tasks)


def asked(method, data, count, fleet="uniform-2", rounds=1):
    """Who was asked to measure, and the records."""
    settings = RoundSettings(rounds, 2, 1, norm=NormSettings(count, count))
    setup = setup_of(method, cnn_model(), data, fleet, settings)
    engine, records = Counting(InProcess(method, setup.model, data)), []
    end = run_rounds(setup, engine, lambda record, _at: records.append(record))
    return [each for each in engine.asked if each[0] != "train"], records, end


def test_a_sample_of_those_who_can_run_a_width_calibrates_it():
    found, (record,), _ = asked(STATIC, image_data((4,) * 30), 5)
    assert len(found) == 2 * 5  # of each of two widths
    assert record.cohort.measured_on == 5
    assert record.as_row()["measured_on"] == 5
    again, _, _ = asked(STATIC, image_data((4,) * 30), 5)
    assert found == again


def test_of_clients_that_evaluate_themselves_a_sample_of_every_tier_is_asked():
    found, (record,), _ = asked(get_method("fedpa")(), image_data((4,) * 30), 3)
    assert record.cohort.measured_on == 2 * 3
    evaluated = [tier for action, _, tier in found if action == "evaluate"]
    assert sorted(map(evaluated.count, set(evaluated))) == [3, 3]


def test_few_clients_are_all_asked_and_the_bits_are_those_of_all():
    few, (record,), end = asked(STATIC, image_data((4,) * 6), 100)
    everyone, (other,), all_of_them = asked(STATIC, image_data((4,) * 6), 0)
    assert few == everyone
    assert record.as_row() == other.as_row()
    assert "measured_on" not in record.as_row()
    assert differing(end.state.weights, all_of_them.state.weights) == set()


def test_a_width_that_few_can_run_is_still_measured_by_those():
    """One client in forty has the whole width: it is found among all, because budgets are few."""
    fleet = fleet_of([{"name": "1/2", "width": "1/2", "share": 39}, {"name": "1", "width": 1, "share": 1}])
    found, _, _ = asked(STATIC, image_data((4,) * 40), 3, fleet)
    assert [client for _, client, tier in found if tier == "1"].count(39) >= 1


def test_negative_numbers_are_refused():
    with pytest.raises(FedtailorError, match="norm.calibration_clients = -1: expected at least 0"):
        NormSettings(-1)


@pytest.mark.slow
def test_calibration_of_a_hundred_thousand_clients_takes_less_than_two_seconds():
    clients = 100_000
    examples, places = images(1000), np.arange(2 * clients) % 1000
    offsets = 2 * np.arange(clients + 1)
    data = FederatedData("many", examples, images(20, seed=7), Partition(places, offsets), 4)
    setup = setup_of(STATIC, cnn_model(), data, "uniform-5")
    inquiry = Inquiry(setup, Timely(InProcess(STATIC, setup.model, data), 1e6))
    clients_of_round = setup.clients(0)
    started = time.process_time()
    calibrate(inquiry, setup.start.state, [tier.budget for tier in setup.fleet.tiers], clients_of_round)
    seconds = time.process_time() - started
    print(f"{seconds:.2f} s for {clients:,} clients")
    assert inquiry.sampled == 100
    assert seconds < 2
