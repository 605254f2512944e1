"""Validation examples: what is kept back, who looks at it, and that test examples decide nothing then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor
from commands import call, small_config
from fedtailor import FedtailorError
from fedtailor.client.evaluate import evaluate_patches
from fedtailor.config import make_config
from fedtailor.data.batches import Examples
from fedtailor.data.federated import DataSettings, FederatedData
from fedtailor.data.picture import overview
from fedtailor.engines.workers.pool import WorkerPool
from fedtailor.methods.apfl.fedcs import FedCS
from fedtailor.methods.apfl.fedpa import FedUniform
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.ofa_fl.ofa_fl import OFAFL
from fedtailor.record import RoundRecord
from fedtailor.run.choosing import chooses
from fedtailor.run.interface import run_config
from fedtailor.run.setup import prepare_config
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import evaluate_tiers
from fedtailor.server.setup import RoundSettings
from fedtailor.server.stopping import Stopping
from fedtailor.sweep.plan import make_plan
from helpers import CLASSES, cnn_model, image_data, images, setup_of, tiny_cnn

QUICK: dict[str, Any] = {
    "rounds": 4, "clients_per_round": 4, "evaluate_every": 1, "engine": {"workers": 0}, "fleet": "uniform-2",
    "method": "fedavg",
}  # fmt: skip


def spoilt(data: FederatedData) -> FederatedData:
    """The same data with other labels in the test part: a choice that looks at it comes out differently."""
    x, y = data.test.columns
    return replace(data, test=Examples.of(x, (y + 1) % CLASSES))


def train(data: FederatedData, **settings: Any) -> Any:
    return fedtailor.train(tiny_cnn(), data, **{**QUICK, **settings})


# What is kept back


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "overlapping"])
def test_what_is_kept_back_is_a_share_of_every_client_and_nobody_trains_with_it(partition):
    settings = {"clients": 5, "partition": partition, "examples_per_client": 20, "min_examples": 4}
    plain = FederatedData.from_examples(images(120), images(20), **settings)
    data = FederatedData.from_examples(images(120), images(20), **settings, validation=0.25)
    assert plain.validation is None
    assert data.validation is not None
    kept = data.validation.partition
    assert not set(kept.order) & set(data.partition.order)
    assert data.sizes.min() >= 4
    for client in range(5):
        both = set(data.partition[client]) | set(kept.order)
        assert set(plain.partition[client]) <= both
    if partition == "iid":
        assert kept.sizes.tolist() == [6] * 5
        assert [len(data.examples_for(c, "validate")) for c in range(5)] == [6] * 5
    assert len(data.validation.whole) == len(set(kept.order)) == len(kept.order)
    assert data.fingerprint() != plain.fingerprint()
    assert overview(data)["validation_examples"] == len(kept.order)


def test_a_client_without_validation_examples_of_its_own_measures_on_everyones():
    data = image_data((2, 8, 8)).with_validation(0.25, Seeds(0))
    assert data.validation is not None
    assert data.validation.partition.sizes.tolist() == [0, 2, 2]
    assert [len(data.examples_for(client, "validate")) for client in range(3)] == [4, 2, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataSettings(validation=1.0), "validation = 1.0: expected auto, or a share from 0 to below 1"),
        (lambda: make_config({"data": {"validation": -0.1}}), "validation = -0.1: expected auto, or a share"),
        (lambda: train(image_data(), validation=2), "validation = 2: expected auto, or a share"),
        (lambda: train(image_data(), validation="some"), "validation = 'some': expected auto, or a share"),
        (lambda: image_data((2, 2)).with_validation(0.1, Seeds(0)), "has more than 2 examples, so none can be kept"),
        (
            lambda: FederatedData.from_examples(
                images(8), images(8), parts=[[0, 1, 2], [2, 0, 1], [3, 4, 5, 6, 7]], validation=0.9
            ),
            "client 0 would be left with 0 example",
        ),
    ],
)  # fmt: skip
def test_shares_that_cannot_be_are_refused(make, words):
    with pytest.raises(FedtailorError, match=words):
        make()


# When it is kept back


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, None),
        ({"stopping": {"patience": 2}}, 6),
        ({"stopping": {"restore_best": True}}, 6),
        ({"stopping": {"restore_best": True}, "validation": 0}, None),
        ({"validation": 0.5}, 18),
        ({"method": OFAFL(ratios=(1, "1/2"))}, 6),
        ({"method": OFAFL(ratios=(1, "1/2"), trigger="schedule")}, None),
        ({"method": FedCS(warmup=2, patience=1)}, 6),
        ({"method": FedCS(warmup=2)}, None),
    ],
)
def test_a_tenth_is_kept_back_where_something_is_chosen_and_nothing_elsewhere(settings, kept):
    """Six clients of six examples each; a share is rounded up."""
    fleet = {"fleet": "equal"} if "method" in settings else {}
    run = train(image_data(), rounds=1, **settings, **fleet)
    assert (None if run.data.validation is None else len(run.data.validation.partition.order)) == kept
    assert (run.history[-1].validation is None) == (kept is None)
    assert run.data.sizes.sum() == 36 - (kept or 0)


class Watchful(FedAvg):
    """A method of one's own that looks at evaluations."""

    def observe(self, state: Any, evaluation: Any) -> Any:
        return state


def test_a_method_that_observes_chooses_unless_it_says_otherwise():
    assert Watchful().chooses
    assert not FedAvg().chooses


# Who looks at it


def test_test_examples_decide_nothing():
    """Other test labels change what is reported, and nothing else: neither the best round, nor when to stop."""
    stopping = {"patience": 1, "restore_best": True, "metric": "loss"}
    data = image_data((8,) * 4)
    one, other = (train(each, rounds=8, stopping=stopping) for each in (data, spoilt(data)))
    assert [record.validation for record in one.history] == [record.validation for record in other.history]
    assert [record.tiers for record in one.history] != [record.tiers for record in other.history]
    assert (one.best_round, len(one.history)) == (other.best_round, len(other.history))
    assert all(torch.equal(value, other.state.weights[name]) for name, value in one.state.weights.items())
    worst = [np.mean([tier["loss"] for tier in record.validation.values()]) for record in one.history]
    assert one.best_round == 1 + int(np.argmin(worst))


def test_with_a_share_of_zero_they_do():
    stopping = {"restore_best": True, "metric": "loss"}
    data = image_data((8,) * 4)
    one, other = (train(each, stopping=stopping, validation=0) for each in (data, spoilt(data)))
    assert one.best_round != other.best_round


def test_validation_scores_are_those_of_what_is_kept_back():
    run = train(image_data((8,) * 4), validation=0.25, rounds=1)
    assert run.data.validation is not None
    swapped = replace(run.setup, data=replace(run.data, test=run.data.validation.whole, validation=None))
    assert run.history[-1].validation == evaluate_tiers(swapped, run.state, run.fleet.tiers).tiers


def test_clients_that_evaluate_their_own_networks_do_so_on_their_own_parts():
    run = train(image_data((8,) * 4), method=FedUniform(), validation=0.25, rounds=1)
    kept, clients = run.data.validation, run.setup.clients(0)
    assert kept is not None
    losses = [
        evaluate_patches(run.model, [run.personal(client.id)], kept.part(client.id))["loss"]
        for client in clients
    ]
    for name, tier in run.history[-1].validation.items():
        own = [loss for loss, client in zip(losses, clients, strict=True) if client.tier == name]
        assert tier["loss"] == pytest.approx(np.mean(own))


def test_methods_are_shown_validation_scores():
    seen: list[Any] = []

    class Noting(FedAvg):
        def observe(self, state: Any, evaluation: Any) -> Any:
            seen.append(evaluation)
            return state

    run = train(image_data(), method=Noting(), rounds=2)
    assert seen == [record.validation for record in run.history]
    assert seen != [record.tiers for record in run.history]


@pytest.mark.slow
def test_workers_measure_on_the_same_examples():
    data = image_data((8,) * 4).with_validation(0.25, Seeds(0))
    setup = setup_of(FedAvg(), cnn_model(), data, "uniform-2", RoundSettings(stopping=Stopping(patience=1)))
    state, tiers = setup.start.state, setup.fleet.tiers
    with WorkerPool(setup.method, setup.model, data, 1) as pool:
        for action in ("evaluate", "validate"):
            here = evaluate_tiers(setup, state, tiers, action=action)
            assert evaluate_tiers(setup, state, tiers, pool, action) == here


# What is said and written


def test_the_record_has_both_scores_and_is_read_back():
    record = RoundRecord(3, tiers={"1": {"loss": 1.0}}, validation={"1": {"loss": 2.0}})
    assert record.as_row()["validation"] == {"1": {"loss": 2.0}}
    assert RoundRecord.from_row(record.as_row()) == record
    assert "validation" not in RoundRecord(3).as_row()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], None),
        (["stopping.patience=2"], "on 10 validation examples, which decided; test examples decided nothing."),
        (["data.validation=0.2"], "on 20 validation examples, kept back from training."),
        (
            ["stopping.restore_best=true", "data.validation=0"],
            "on the test examples, which decided: its figures",
        ),
    ],
)
def test_the_summary_says_what_was_chosen_by_which_examples(settings, words, tmp_path, monkeypatch, capsys):
    config = small_config(tmp_path, rounds=1)
    sets = [word for setting in settings for word in ("--set", setting)]
    assert call(monkeypatch, "run", str(config), "--runs", str(tmp_path / "runs"), *sets) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("is the best by mean accuracy" in said) == (words is not None)
    assert words is None or words in said


def test_a_comparison_keeps_the_same_examples_back_for_all(tmp_path):
    """A method that prunes when evaluations stand still chooses: the others must not train on more examples."""
    config = small_config(tmp_path)
    shares = {}
    for methods in ("fedavg,ofa-fl", "fedavg,heterofl", "fedavg,ofa-fl:trigger=schedule"):
        plan = make_plan(config, methods, 1, [], [], tmp_path / "runs")
        shares[methods] = [run.config.data.validation for run in plan.runs]
    assert list(shares.values()) == [[0.1, 0.1], ["auto", "auto"], ["auto", "auto"]]


def test_a_config_says_it_all(tmp_path):
    table = {
        "rounds": 1, "clients_per_round": 2, "data": {"clients": 4, "limit": 60}, "fleet": {"name": "uniform-2"},
        "model": {"name": "cnn", "channels": [4, 8]}, "engine": {"workers": 0}, "stopping": {"patience": 1},
    }  # fmt: skip
    config = make_config(table)
    assert chooses(config)
    prepared = prepare_config(config)
    run = run_config(config, tmp_path / "run")
    for data in (prepared.data, run.data):
        assert data.validation is not None
        assert (int(data.sizes.sum()), len(data.validation.partition.order)) == (52, 8)
