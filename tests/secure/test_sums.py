"""Sums under masks: exactly those of the quantised updates, whoever drops out; and nothing where too few are there."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.merging.settings import ServerSettings
from fedtailor.messages import Refused
from fedtailor.methods.registry import get_method
from fedtailor.privacy.guard import pieces_of
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.run.setup import check_masked
from fedtailor.secure.coverage import Coverage
from fedtailor.secure.protocol import Collector, Plan
from fedtailor.secure.settings import SecureSettings
from fedtailor.secure.shamir import secret_of, shares_of
from fedtailor.secure.together import Together
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings
from helpers import Spoiling, cnn_model, differing, image_data, mlp_model, setup_of, vector_data

OPEN = {"label_rows": False, "norm": "averaged"}


def secure_setup(
    name="heterofl", model=None, data=None, fleet="uniform-3", threshold=2, clients=9, **settings
):
    method = get_method(name)(**{**(OPEN if name in ("heterofl", "fedrolex") else {}), **settings})
    wanted = RoundSettings(2, clients, 100, secure=SecureSettings(threshold))
    setup = setup_of(method, model or mlp_model(), data or vector_data((6, 5, 7) * 3), fleet, wanted)
    check_masked(setup)
    return setup.guarded(None, 0)


def run(setup, engine=None):
    records = []
    inner = InProcess(setup.method, setup.model, setup.data)
    end = run_rounds(setup, engine(inner) if engine else inner, lambda record, _at: records.append(record))
    return end.state, records


class Watched:
    """Every sum that a server came to, beside the plain sum of the words of those who had sent."""

    def __init__(self, monkeypatch):
        self.seen = []
        summed = Together.summed

        def watched(this, plan, words):
            found = summed(this, plan, words)
            self.seen.append((plan, {client: dict(own) for client, own in words.items()}, found))
            return found

        monkeypatch.setattr(Together, "summed", watched)

    def check(self):
        assert self.seen
        for plan, words, found in self.seen:
            assert found
            for label, (total, senders) in found.items():
                plain = sum(words[client][label].astype(np.uint64) for client in senders)
                assert np.array_equal(total, plain)  # below 2^32: nothing ran over
                assert senders == [client for client in sorted(words) if client in plan.classes[label]]


def without(*lost):
    def engine(inner):
        for client in lost:
            inner = Spoiling(inner, client, lambda update: Refused(update.client, update.round, "no-answer"))
        return inner

    return engine


@pytest.mark.parametrize("lost", [(), (0,), (1, 4, 8)], ids=["nobody", "one", "three of nine"])
@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_sums_are_exactly_those_of_the_quantised_updates(name, lost, monkeypatch):
    """Three nested tiers, and windows that roll; those who are lost had shared their keys."""
    watched = Watched(monkeypatch)
    setup = secure_setup(name, cnn_model(), image_data((6,) * 9))
    plain = replace(setup, masks=None)
    state, records = run(setup, without(*lost))
    watched.check()
    assert len(watched.seen[0][0].classes) >= 3
    expected, _ = run(plain, without(*lost))
    assert records[-1].privacy["rested"] == {}
    for name, value in expected.weights.items():
        if value.is_floating_point():
            assert torch.allclose(state.weights[name], value, atol=2e-6), name


@pytest.mark.parametrize("name", ["fedavg", "fjord", "federated-dropout", "fiarse"])
def test_other_methods_and_weights_by_examples(name, monkeypatch):
    watched = Watched(monkeypatch)
    settings = {"mask": "round"} if name == "federated-dropout" else {}
    setup = secure_setup(name, **settings)
    state, _ = run(setup)
    watched.check()
    expected, _ = run(replace(setup, masks=None))
    assert all(
        torch.allclose(state.weights[key], value, atol=2e-5) for key, value in expected.weights.items()
    )


def test_a_class_with_too_few_clients_rests_bit_for_bit():
    """Three clients of each tier: the last tier alone holds the outermost class, and four are wanted."""
    setup = secure_setup(threshold=4)
    state, records = run(setup)
    assert records[-1].privacy["rested"] == {"1": 3}
    before = setup.start.state.weights
    begun = setup.method.begin(setup.start.state, setup.model)
    pieces = pieces_of(setup.method, setup.model, setup.fleet.tiers, begun, setup.seeds)
    held = Coverage.of(before, pieces, [tier.name for tier in setup.fleet.tiers], setup.model).held
    for name, bits in held.items():
        outer = bits == 4
        assert torch.equal(state.weights[name][outer], before[name][outer])
        assert bool((state.weights[name][~outer] != before[name][~outer]).any())


def test_a_round_that_more_than_a_third_has_left_moves_nothing():
    setup = secure_setup()
    state, records = run(setup, without(0, 3, 6, 7))
    assert len(records[-1].privacy["rested"]) == 3
    assert differing(state.weights, setup.start.state.weights) == set()


def test_bytes_are_hardly_more_than_plain():
    setup = secure_setup(model=mlp_model(800), fleet="equal")
    _, records = run(setup)
    plain = records[-1].training.bytes_up
    assert (
        plain < records[-1].privacy["bytes"] < 1.1 * plain + 9 * 9 * 400
    )  # shares do not grow with the network


def test_a_signed_log_has_the_digests_of_what_was_sent_under_masks():
    """They are others in every run, though the models are the same."""
    setup = replace(secure_setup(), audited=True)
    (_, first), (_, second) = run(setup), run(setup)
    told = [records[-1].audit for records in (first, second)]
    assert told[0]["model"] == told[1]["model"]
    assert told[0]["updates"].keys() == {str(client) for client in range(9)}
    assert not set(told[0]["updates"].values()) & set(told[1]["updates"].values())


def test_shares_tell_a_secret_from_any_enough_of_them():
    secret = bytes(range(32))
    shares = shares_of(secret, 3, [1, 2, 5, 9])
    for chosen in ((1, 2, 5), (2, 5, 9), (1, 2, 5, 9)):
        assert secret_of({each: shares[each] for each in chosen}, 3) == secret
    with pytest.raises(FedtailorError, match="at least 3"):
        secret_of({1: shares[1], 2: shares[2]}, 3)
    others = shares_of(secret, 3, [1, 2, 5, 9])
    assert all(shares[each] != others[each] for each in shares)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("flado", {}, "flado looks at single answers in its merge"),
        ("federated-dropout", {"mask": "client"}, "gives each client a piece of its own"),
        ("heterofl", {"label_rows": True}, r"expected method\.label_rows = false"),
        ("fedavg", {"server": ServerSettings("adam")}, r"server\.optimiser = 'adam'"),
        (
            "fedavg",
            {"merging": MergeSettings("krum")},
            r"merge\.rule = 'krum': a rule compares single answers",
        ),
        ("fedavg", {"threshold": 10}, r"secure\.threshold = 10: expected at most clients_per_round = 9"),
        ("fedavg", {"threshold": 1}, r"secure\.threshold = 1: expected 0, or at least 2 clients"),
    ],
)
def test_what_cannot_be_masked_is_refused(name, settings, sentence):
    with pytest.raises(FedtailorError, match=sentence):
        secure_setup(name, **settings)


def test_on_flower_single_weights_and_scores_in_clear_are_refused(monkeypatch):
    setup = secure_setup("fiarse", cnn_model(), image_data((6,) * 9), norm="averaged")
    monkeypatch.setattr(type(setup.data), "remote", True)
    with pytest.raises(FedtailorError, match="fiarse leaves out single weights"):
        check_masked(setup)
    kept = setup.data.with_validation(0.5, setup.seeds, 2)
    with pytest.raises(FedtailorError, match=r"expected data\.validation = 0"):
        check_masked(replace(setup, data=kept))


def test_privacy_and_masks_together_are_refused():
    settings = RoundSettings(2, 9, 100, secure=SecureSettings(2), privacy=PrivacySettings(clip=1.0))
    with pytest.raises(FedtailorError, match="there is no noise under masks yet"):
        check_masked(setup_of(get_method("fedavg")(), mlp_model(), vector_data(), "equal", settings))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(FedtailorError, match=r"pip install 'fedtailor\[secure\]'"):
        secure_setup()


def test_a_collector_without_enough_openings_says_so():
    plan = Plan("round", {"1": [0, 1, 2]}, 2)
    with pytest.raises(FedtailorError, match="0 of 3 clients were there at the end, and 2 are needed"):
        Collector(plan, dict.fromkeys(range(3))).sums({}, [0, 1, 2], {})
