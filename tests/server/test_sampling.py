from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.fleet import fleet_by_name
from fedtailor.messages import Client
from fedtailor.seeds import Seeds
from fedtailor.server.sampling import sample
from helpers import client

TWENTY = [client(number) for number in range(20)]


def ids(count: int, round_: int = 0, seed: int = 0, clients=TWENTY) -> list[int]:
    return [chosen.id for chosen in sample(clients, count, round_, Seeds(seed))]


@given(st.integers(0, 30), st.integers(0, 1000), st.integers(0, 1000))
def test_a_cohort_is_different_known_clients_in_order(count, round_, seed):
    chosen = ids(count, round_, seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, 20)
    assert set(chosen) <= set(range(20))


def test_the_seed_and_the_round_fix_the_cohort():
    assert ids(5, 3, 1) == ids(5, 3, 1)
    assert len({tuple(ids(5, round_)) for round_ in range(20)}) > 15
    assert len({tuple(ids(5, 0, seed)) for seed in range(20)}) > 15


def test_everyone_takes_part_when_all_are_asked_for_in_any_order_of_the_list():
    assert ids(20, clients=TWENTY[::-1]) == list(range(20))
    assert ids(100) == list(range(20))


def test_clients_keep_what_they_are():
    tiers = [
        client(number, width=1 / (number + 1), examples=number + 1, tier=str(number)) for number in range(8)
    ]
    chosen = sample(tiers, 3, 0, Seeds(0))
    assert [replace(each, slot=0) for each in chosen] == [tiers[each.id] for each in chosen]
    assert [each.slot for each in chosen] == [0, 1, 2]


def test_clients_left_over_by_participants_may_have_any_ids():
    assert set(ids(2, clients=[client(3), client(50), client(7)])) <= {3, 7, 50}
    assert ids(1, clients=[]) == []


def test_every_client_is_as_likely_as_any_other():
    counts = np.bincount([number for round_ in range(2000) for number in ids(5, round_)], minlength=20)
    assert counts.sum() == 10_000
    assert abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)  # five standard deviations


class Counting(Sequence[Client]):
    """A population that counts how many clients were looked at."""

    def __init__(self, inner: Sequence[Client]) -> None:
        self.inner, self.looked_at = inner, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index):
        self.looked_at += 1
        return self.inner[index]


def test_a_cohort_out_of_a_million_looks_at_no_one_else():
    population = Counting(fleet_by_name("uniform-5").capacity(np.full(1_000_000, 7), 0, Seeds(0)))
    chosen = sample(population, 100, 0, Seeds(0))
    assert len({one.id for one in chosen}) == 100
    assert all(0 <= one.id < 1_000_000 and one.num_examples == 7 for one in chosen)
    assert population.looked_at == 100
