"""What messages tell: nothing of an update beyond the sum; masks are used once; a server that cheats gets nothing."""

from __future__ import annotations

import secrets
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from test_sums import run, secure_setup

from fedtailor.errors import FedtailorError
from fedtailor.secure import protocol, streams
from fedtailor.secure.protocol import Participant, Plan, needed
from helpers import mlp_model

CLASSES = {"all": [0, 1, 2, 3], "large": [2, 3]}


def plan(threshold: int = 2, classes=CLASSES) -> Plan:
    return Plan(f"a round {secrets.token_hex(8)}", classes, threshold)


def until_shared(of: Plan):
    """The participants of a round, and what each has received, when all have shared their keys."""
    clients = {client: Participant(client, of) for client in of.cohort}
    keys = {client: each.advertise() for client, each in clients.items()}
    shares = {client: each.share(keys) for client, each in clients.items()}
    return clients, {to: {sender: shares[sender][to] for sender in clients} for to in clients}, keys


def first_words(updates: dict[int, int], runs: int) -> np.ndarray:
    """What client 0 sends for one coordinate, in many rounds."""
    found = []
    of = Plan("", {"all": [0, 1]}, 2)
    for _ in range(runs):
        clients, arrived, _ = until_shared(Plan(secrets.token_hex(8), of.classes, 2))
        words = {"all": np.array([updates[0], 1], dtype=np.uint32)}
        found.append(clients[0].masked(arrived[0], words)["all"][0])
    return np.array(found, dtype=np.uint64)


@pytest.mark.slow
def test_a_message_is_independent_of_the_update_given_the_sum():
    """Two pairs of updates with the same sum: what client 0 sends is distributed alike, and evenly."""
    one, other = first_words({0: 0, 1: 7}, 1500), first_words({0: 7, 1: 0}, 1500)
    tables = np.array(
        [np.bincount((each >> np.uint64(28)).astype(int), minlength=16) for each in (one, other)]
    )
    assert stats.chi2_contingency(tables).pvalue > 1e-4
    for row in tables:
        assert stats.chisquare(row).pvalue > 1e-4


@pytest.mark.parametrize("update", [np.zeros(40_000), np.arange(40_000)])
def test_a_masked_row_looks_like_noise(update):
    """Every byte of it as often as any other, and no correlation with the update."""
    clients, arrived, _ = until_shared(plan())
    words = update.astype(np.uint32)
    sent = clients[2].masked(arrived[2], {"all": words, "large": words})
    for label, row in sent.items():
        assert stats.chisquare(np.bincount(row.view(np.uint8), minlength=256)).pvalue > 1e-5, label
        if update.any():
            assert abs(np.corrcoef(update, row.astype(float))[0, 1]) < 5 / len(update) ** 0.5
    assert np.count_nonzero(sent["all"] == sent["large"]) < 10  # the same values, other masks


def test_removing_the_self_masks_alone_leaves_a_row_masked():
    """The server learns the self-mask of everyone who has sent: pairwise masks must still hide each row."""
    clients, arrived, _ = until_shared(plan())
    words = np.zeros(40_000, dtype=np.uint32)
    sent = clients[2].masked(arrived[2], {"all": words, "large": words})
    for label, row in sent.items():
        left = row - streams.mask(clients[2].selves[label], clients[2].plan.purpose(label), len(row))
        assert stats.chisquare(np.bincount(left.view(np.uint8), minlength=256)).pvalue > 1e-5, label


def test_no_stream_is_used_twice_across_rounds_classes_and_repeats(monkeypatch):
    """Each end of a pair makes its stream once, and so does the server for a self-mask; no key serves anything else."""
    used: Counter[tuple[bytes, str]] = Counter()
    mask = streams.mask

    def watched(secret, purpose, length):
        used[streams.derived(secret, f"mask {purpose}"), purpose] += 1
        return mask(secret, purpose, length)

    monkeypatch.setattr(protocol, "mask", watched)
    setup = secure_setup(model=mlp_model(), clients=6, threshold=2)
    run(setup)
    first = dict(used)
    run(setup)  # the same rounds again, as after a crash
    assert set(used.values()) == {2}
    assert len({key for key, _ in used}) == len(used)
    assert len(used) == 2 * len(first)


def test_an_opening_has_one_share_of_each_peer_and_is_given_once():
    clients, arrived, _ = until_shared(plan())
    words = {"all": np.zeros(3, dtype=np.uint32)}
    clients[0].masked(arrived[0], words)
    opening = clients[0].unmask([0, 1, 3])
    assert (set(opening.selves), set(opening.keys)) == ({0, 1, 3}, {2})
    with pytest.raises(FedtailorError, match="the client says nothing"):
        clients[0].unmask([0, 1, 2, 3])


def test_a_server_that_cheats_is_told_nothing():
    words = {"all": np.zeros(3, dtype=np.uint32), "large": np.zeros(3, dtype=np.uint32)}
    clients, arrived, _ = until_shared(plan(threshold=3))
    with pytest.raises(FedtailorError, match="2 clients in class large, fewer than secure.threshold = 3"):
        clients[2].masked(arrived[2], words)
    clients, arrived, _ = until_shared(plan())
    with pytest.raises(FedtailorError, match="too few clients have shared"):
        clients[2].masked({2: arrived[2][2]}, words)
    clients[2].masked(arrived[2], words)
    for survivors in ([2], [0, 1, 3], [0, 1, 2, 9]):  # too few; without itself; someone who was never there
        with pytest.raises(FedtailorError, match="the client says nothing"):
            clients[2].unmask(survivors)
    fresh = Participant(0, plan())
    twice = {0: fresh.advertise(), 1: fresh.advertise()}  # one key under two names
    with pytest.raises(FedtailorError, match="the list of keys is not that of this round"):
        fresh.share(twice)
    clients, arrived, _ = until_shared(plan())
    changed = {**arrived[0], 1: arrived[0][1][:-1] + bytes([arrived[0][1][-1] ^ 1])}
    clients[0].masked(changed, {"all": words["all"]})
    with pytest.raises(FedtailorError, match="a share was changed on its way"):
        clients[0].unmask([0, 1, 2, 3])


def test_three_of_ten_may_drop_out():
    assert all(clients - int(0.3 * clients) >= needed(clients) > clients / 2 for clients in range(2, 200))
