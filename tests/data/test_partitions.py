from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.data import partitions
from fedtailor.data.partitions import Partition
from fedtailor.errors import FedtailorError

seeds = st.integers(0, 2**32 - 1)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_exact(partition: Partition, examples: int, clients: int) -> None:
    """Every example with exactly one client, and the sizes agree."""
    assert len(partition) == clients
    assert sorted(partition.order.tolist()) == list(range(examples))
    assert partition.sizes.tolist() == [len(partition[client]) for client in range(clients)]


def same(one: Partition, other: Partition) -> bool:
    return np.array_equal(one.order, other.order) and np.array_equal(one.offsets, other.offsets)


@given(st.integers(1, 300), st.data(), seeds)
def test_iid_is_exact_and_even(examples: int, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, examples))
    partition = partitions.iid(examples, clients, rng(seed))
    assert_exact(partition, examples, clients)
    assert partition.sizes.max() - partition.sizes.min() <= 1
    assert same(partition, partitions.iid(examples, clients, rng(seed)))


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=300),
    st.floats(1e-6, 1e6),
    st.booleans(),
    st.data(),
    seeds,
)
def test_dirichlet_is_exact_and_keeps_the_minimum(labels, alpha, balanced, data, seed) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(0, len(labels) // clients))
    array = np.array(labels)

    def draw() -> Partition:
        return partitions.dirichlet(array, clients, alpha, rng(seed), min_examples=minimum, balanced=balanced)

    partition = draw()
    assert_exact(partition, len(labels), clients)
    assert partition.sizes.min() >= minimum
    assert same(partition, draw())


def test_dirichlet_follows_alpha() -> None:
    labels = np.repeat(np.arange(10), 500)
    spread = {}
    for alpha in (0.05, 1.0, 1000.0):
        partition = partitions.dirichlet(labels, 20, alpha, rng(0))
        counts = np.array([np.bincount(labels[partition[client]], minlength=10) for client in range(20)])
        spread[alpha] = float((counts > 0).sum(1).mean())
    assert spread[0.05] < spread[1.0] <= spread[1000.0] == 10
    near_equal = partitions.dirichlet(labels, 20, 1e6, rng(0)).sizes
    assert near_equal.min() > 240


def test_dirichlet_tops_up_only_as_far_as_needed() -> None:
    labels = np.repeat(np.arange(10), 100)
    drawn = partitions.dirichlet(labels, 50, 0.05, rng(3), min_examples=0)
    topped = partitions.dirichlet(labels, 50, 0.05, rng(3), min_examples=5)
    small = drawn.sizes < 5
    assert small.any()
    assert (topped.sizes[small] == 5).all()
    level = topped.sizes[drawn.sizes > topped.sizes].max()
    untouched = ~small & (drawn.sizes < level)
    for client in np.flatnonzero(untouched):
        assert set(drawn[client]) == set(topped[client])


def test_dirichlet_never_hangs() -> None:
    labels = np.repeat(np.arange(10), 6000)
    begin = time.perf_counter()
    partition = partitions.dirichlet(labels, 1000, 0.01, rng(0), min_examples=10)
    assert time.perf_counter() - begin < 2
    assert partition.sizes.min() == 10


def test_balanced_dirichlet_stops_at_the_fair_share() -> None:
    labels = np.repeat(np.arange(10), 600)
    free = partitions.dirichlet(labels, 20, 0.5, rng(1))
    balanced = partitions.dirichlet(labels, 20, 0.5, rng(1), balanced=True)
    assert balanced.sizes.max() < free.sizes.max()
    assert balanced.sizes.std() < free.sizes.std()


@given(st.integers(1, 9), st.integers(1, 40), st.data(), seeds)
def test_classes_gives_each_client_as_many_as_asked(num_classes, clients, data, seed) -> None:
    each = data.draw(st.integers(-(-num_classes // clients), num_classes)) if clients < num_classes else None
    each = each or data.draw(st.integers(1, num_classes))
    per_class = data.draw(st.integers(-(-clients * each // num_classes), 60))
    labels = np.tile(np.arange(num_classes), per_class)
    partition = partitions.classes(labels, clients, each, num_classes, rng(seed))
    assert_exact(partition, len(labels), clients)
    counts = np.array(
        [np.bincount(labels[partition[client]], minlength=num_classes) for client in range(clients)]
    )
    assert ((counts > 0).sum(1) == each).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for label in range(num_classes):
        held = counts[:, label][counts[:, label] > 0]
        assert held.max() - held.min() <= 1
    assert same(partition, partitions.classes(labels, clients, each, num_classes, rng(seed)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.data(), seeds)
def test_shards_are_exact_and_few_labelled(labels, data, seed) -> None:
    each = data.draw(st.integers(1, min(5, len(labels))))
    clients = data.draw(st.integers(1, len(labels) // each))
    partition = partitions.shards(np.array(labels), clients, each, rng(seed))
    assert_exact(partition, len(labels), clients)
    assert partition.sizes.max() - partition.sizes.min() <= each
    assert same(partition, partitions.shards(np.array(labels), clients, each, rng(seed)))


def test_shards_of_the_paper() -> None:
    labels = np.repeat(np.arange(10), 60)
    partition = partitions.shards(labels, 100, 2, rng(0))
    assert set(partition.sizes) == {6}
    assert max(len(set(labels[partition[client]])) for client in range(100)) <= 2


@given(st.integers(1, 500), st.floats(0, 8), st.data(), seeds)
def test_quantity_is_exact_and_keeps_the_minimum(examples, skew, data, seed) -> None:
    clients = data.draw(st.integers(1, examples))
    minimum = data.draw(st.integers(0, examples // clients))
    partition = partitions.quantity(examples, clients, skew, rng(seed), min_examples=minimum)
    assert_exact(partition, examples, clients)
    assert partition.sizes.min() >= minimum
    assert same(partition, partitions.quantity(examples, clients, skew, rng(seed), min_examples=minimum))


def test_quantity_without_skew_is_even() -> None:
    sizes = partitions.quantity(1000, 7, 0.0, rng(0)).sizes
    assert sizes.max() - sizes.min() <= 1


@given(st.lists(st.sampled_from(["ann", "bob", "cyd"]), min_size=1))
def test_natural_is_one_client_per_id(ids) -> None:
    partition, names = partitions.natural(np.array(ids))
    assert_exact(partition, len(ids), len(set(ids)))
    for client, name in enumerate(names):
        assert {ids[example] for example in partition[client]} == {name}


@given(st.integers(1, 100), st.integers(1, 300), st.data(), seeds)
def test_overlapping_clients_hold_nothing_twice_and_use_all_alike(examples, clients, data, seed) -> None:
    each = data.draw(st.integers(1, examples))
    partition = partitions.overlapping(examples, clients, each, rng(seed))
    assert (partition.sizes == each).all()
    assert all(len(set(partition[client])) == each for client in range(clients))
    decks = -(-clients // (examples // each))
    assert np.bincount(partition.order).max() <= decks


@given(st.integers(2, 60), seeds)
@settings(max_examples=30)
def test_select_keeps_the_parts(clients: int, seed: int) -> None:
    partition = partitions.quantity(200, clients, 1.5, rng(seed), min_examples=0)
    chosen = rng(seed).permutation(clients)[: clients // 2]
    selected = partition.select(chosen)
    assert [part.tolist() for part in map(selected.__getitem__, range(len(selected)))] == [
        partition[client].tolist() for client in chosen
    ]


def test_saved_partitions_come_back(tmp_path: Path) -> None:
    partition = partitions.dirichlet(np.arange(100) % 10, 8, 0.3, rng(0))
    partition.save(tmp_path / "partition.safetensors")
    assert same(Partition.load(tmp_path / "partition.safetensors"), partition)
    assert [path.name for path in tmp_path.glob("*part*")] == ["partition.safetensors"]
    content = (tmp_path / "partition.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(content[: len(content) // 2])
    for name in ("cut", "absent"):
        with pytest.raises(FedtailorError, match=name):
            Partition.load(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partitions.iid(5, 6, rng(0)), "at most 5 for 5"),
        (lambda: partitions.iid(5, 0, rng(0)), "clients = 0"),
        (lambda: partitions.dirichlet(np.zeros(10, int), 4, 0.5, rng(0), min_examples=3), "at most 3 for 10"),
        (lambda: partitions.dirichlet(np.zeros(10, int), 4, 0.0, rng(0)), "alpha = 0.0"),
        (lambda: partitions.dirichlet(np.zeros(10, int), 4, float("nan"), rng(0)), "alpha = nan"),
        (lambda: partitions.dirichlet(np.zeros(10, int), 4, -1.0, rng(0)), "alpha = -1.0"),
        (lambda: partitions.classes(np.array([0, 0, 2]), 3, 1, 3, rng(0)), r"classes \[1\] have no examples"),
        (lambda: partitions.classes(np.array([0, 1, 2]), 3, 4, 3, rng(0)), "classes_per_client = 4"),
        (lambda: partitions.classes(np.arange(9) % 3, 2, 1, 3, rng(0)), "cover all 3 classes"),
        (lambda: partitions.classes(np.array([0, 1, 1, 1, 1]), 4, 1, 2, rng(0)), "class 0 has 1 example"),
        (lambda: partitions.shards(np.zeros(5, int), 3, 2, rng(0)), "at most 2 for 5"),
        (lambda: partitions.quantity(5, 2, -1.0, rng(0)), "skew = -1.0"),
        (lambda: partitions.overlapping(5, 2, 6, rng(0)), "examples_per_client = 6"),
        (lambda: Partition.from_parts([]), "at least one client"),
        (lambda: Partition.from_parts([[-1]]), "0 or more"),
        (lambda: Partition(np.arange(3), np.array([0, 2])), "rise"),
        (lambda: Partition.from_parts([[0]])[1], "client = 1"),
    ],
)
def test_impossible_partitions_are_refused(make, words) -> None:
    with pytest.raises(FedtailorError, match=words):
        make()


def test_a_million_clients() -> None:
    begin = time.perf_counter()
    partition = partitions.overlapping(50_000, 1_000_000, 20, rng(0))
    assert time.perf_counter() - begin < 5
    assert len(partition) == 1_000_000
    assert partition.order.nbytes + partition.offsets.nbytes < 100 * 2**20
