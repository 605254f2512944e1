"""What measuring costs, to the byte and the multiply-accumulate, and that training costs what it did."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fedtailor.client.local_training import LocalTraining
from fedtailor.methods.registry import get_method
from fedtailor.record import Spent
from helpers import Spoiling, cnn_model, image_data, mlp_model, run, vector_data

# ``tiny_cnn(4, 6)`` on 4 x 4 pixels, by hand: two convolutions with bias and norm, and a classifier.
TRAINED = (4 * 9 + 4) + 2 * 4 + (6 * 4 * 9 + 6) + 2 * 6 + (24 * 4 + 4)  # numbers
STATISTICS = 4 * 2 * (4 + 6) + 2 * 8  # bytes: means and variances, and two counters of 64 bits
FORWARD = 4 * (9 + 1) * 16 + 6 * (4 * 9 + 1) * 4 + (24 + 1) * 4  # multiply-accumulates; a bias is one

# Its half: 2 and 3 channels.
HALF_TRAINED = (2 * 9 + 2) + 2 * 2 + (3 * 2 * 9 + 3) + 2 * 3 + (12 * 4 + 4)
HALF_STATISTICS = 4 * 2 * (2 + 3) + 2 * 8
HALF_FORWARD = 2 * (9 + 1) * 16 + 3 * (2 * 9 + 1) * 4 + (12 + 1) * 4

TEST = 20  # examples that everyone evaluates on
LOCAL = LocalTraining(batch_size=4)


def test_a_model_costs_what_was_counted_by_hand():
    from fedtailor.elasticity.cutting.cut import Cut
    from fedtailor.elasticity.cutting.selections import prefix

    model = cnn_model(4, 6)
    assert model.cost(Cut.everything()).macs == FORWARD
    assert model.cost(prefix(model.groups, Fraction(1, 2))).macs == HALF_FORWARD


def test_calibration_sends_the_weights_down_and_the_statistics_up():
    """Clients with 6 and 5 examples, in batches of 4: the last batch of the second is a single one, and is not run."""
    method, model = get_method("heterofl")(local=LOCAL), cnn_model(4, 6)
    first, second = run(method, model, image_data((6, 5)), rounds=2, every=2).records
    assert first.measuring == Spent()
    assert second.measuring == Spent(2 * 4 * TRAINED, 2 * STATISTICS, (6 + 4) * FORWARD)
    assert first.training == second.training  # the same work, whether or not it is measured


def test_every_width_is_calibrated_by_those_who_can_run_it():
    method, model = get_method("heterofl")(local=LOCAL), cnn_model(4, 6)
    (record,) = run(method, model, image_data((6, 4)), "uniform-2").records
    half, full = 2, 1  # clients: both can run the half, one the whole
    assert record.measuring == Spent(
        4 * (half * HALF_TRAINED + full * TRAINED),
        half * HALF_STATISTICS + full * STATISTICS,
        (6 + 4) * HALF_FORWARD + 4 * FORWARD,
    )


@pytest.mark.parametrize("method", ["fedavg", "fjord", "splitmix"])
def test_a_method_whose_clients_are_not_asked_measures_for_nothing(method):
    records = run(get_method(method)(), cnn_model(4, 6), image_data((6, 5)), rounds=2, every=1).records
    assert [record.measuring for record in records] == [Spent(), Spent()]
    records = run(get_method("heterofl")(), mlp_model(), vector_data((6, 5)), every=1).records
    assert records[0].measuring == Spent()  # no norm layer, no statistics


@pytest.mark.parametrize("recalibrate", [False, True])
def test_clients_that_evaluate_themselves_run_the_whole_network_and_their_own(recalibrate):
    """All four have trained, so they have statistics of their own: they are measured anew only where that is asked for.

    The answers are metrics, which are not counted.
    """
    method = get_method("feduniform")(local=LOCAL, recalibrate=recalibrate)
    sizes = (6, 5, 7, 4)
    (record,) = run(method, cnn_model(4, 6), image_data(sizes), "uniform-2").records
    calibrated = 6 + 4 + 7 + 4  # the single example of the second client is not run
    own = (6 + 4) * HALF_FORWARD + (7 + 4) * FORWARD  # two clients of either tier
    calibration = calibrated * FORWARD + (own if recalibrate else 0)
    evaluation = 4 * TEST * FORWARD + 2 * TEST * (HALF_FORWARD + FORWARD)
    assert record.measuring == Spent(2 * 4 * 4 * TRAINED, 0, calibration + evaluation)


def test_a_client_that_has_not_trained_measures_its_own_network_too():
    method = get_method("feduniform")(local=LOCAL)
    (record,) = run(method, cnn_model(4, 6), image_data((6, 6)), "equal", cohort=1).records
    assert record.cohort.merged == 1
    assert record.measuring.macs == (6 + 12) * FORWARD + 2 * TEST * 2 * FORWARD


def test_an_answer_that_is_refused_was_asked_for_but_brought_nothing():
    def spoil(update):
        update.patch.values.clear()
        return update

    method, model = get_method("heterofl")(local=LOCAL), cnn_model(4, 6)
    (record,) = run(
        method, model, image_data((6, 4)), engine=lambda inner: Spoiling(inner, 1, spoil, "calibrate")
    ).records
    assert record.cohort.refused == {"wrong-names": 1}
    assert record.measuring == Spent(2 * 4 * TRAINED, STATISTICS, 6 * FORWARD)
