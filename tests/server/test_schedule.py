"""How often tiers are evaluated where nobody says."""

from __future__ import annotations

import pytest

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.methods.registry import get_method
from fedtailor.seeds import Seeds
from fedtailor.server.schedule import MOST_EVALUATIONS, Work, in_words
from fedtailor.server.setup import RoundSettings
from helpers import cnn_model, federated, image_data, images, setup_of


@pytest.mark.parametrize("rounds", [1, 2, 7, 20, 100, 1000])
@pytest.mark.parametrize("ratio", [0.001, 0.05, 0.3, 1, 4, 30])
def test_evaluation_stays_below_a_tenth_or_happens_once(rounds, ratio):
    work = Work(1.0, ratio)
    every = work.rounds_between(rounds)
    times = len(
        [number for number in range(1, rounds + 1) if RoundSettings(rounds, 1, every).evaluates(number)]
    )
    spent = times * ratio / (rounds + times * ratio)
    assert work.share(rounds, every) == pytest.approx(spent)
    assert spent < 0.1 or (times == 1 and every == rounds)
    assert times <= MOST_EVALUATIONS


def test_the_estimate_is_what_a_run_counts():
    """Equal clients of one tier: the work of FedAvg's round is known, and that of HeteroFL's evaluation too."""
    data, model = federated(images(24), (6,) * 4, test=images(20, seed=7)), cnn_model()
    cost = model.cost(Cut.everything()).macs
    settings = RoundSettings(4, 2)
    averaged = setup_of(get_method("fedavg")(), model, data, "equal", settings).work()
    assert averaged == Work(2 * 6 * 3 * cost, 20 * cost)
    measured = setup_of(get_method("heterofl")(), model, data, "equal", settings).work()
    assert measured == Work(2 * 6 * 3 * cost, 20 * cost + 24 * cost)
    kept = data.with_validation(1 / 3, Seeds(0))  # two examples of each client choose
    choosing = setup_of(get_method("fedavg")(), model, kept, "equal", settings).work()
    assert choosing == Work(2 * 4 * 3 * cost, (20 + 8) * cost)


def test_a_setup_settles_it_and_an_explicit_number_stays():
    method, model, data = get_method("heterofl")(), cnn_model(), image_data()
    settled = setup_of(method, model, data, settings=RoundSettings(300, 6))
    every = settled.settings.evaluate_every
    assert every == settled.work().rounds_between(300)
    assert 1 < every < 300
    assert setup_of(method, model, data, settings=RoundSettings(300, 6, 1)).settings.evaluate_every == 1


def test_it_is_said_in_words():
    assert "after every 10 rounds, about 5 % of the work" in in_words(Work(10, 5), 200, 10)
    assert "after every round, less than 1 %" in in_words(Work(10, 0.01), 20, 1)
    assert "one evaluation is as much work as 11 rounds" in in_words(Work(1, 11), 20, 20)
    assert in_words(Work(1, 1.01), 2, 2).endswith("one evaluation is as much work as 1 round")
