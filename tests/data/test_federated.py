from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.data import DataSettings, Examples, FederatedData, ImagePreparation, federate, load_dataset
from fedtailor.data.sources import Dataset
from fedtailor.data.splits import KINDS
from fedtailor.errors import FedtailorError
from fedtailor.seeds import Seeds

DIGITS = load_dataset("digits")


def small(count: int = 40, classes: int = 4, **fields) -> Dataset:
    x = torch.arange(count, dtype=torch.float32).view(count, 1)
    y = torch.arange(count) % classes
    return Dataset("small", Examples.of(x, y), Examples.of(x[:8], y[:8]), classes, **fields)


def by_writer(**fields) -> Dataset:
    return small(
        client_train=np.array(["ann"] * 20 + ["bob"] * 15 + ["cyd"] * 4 + ["dan"]),
        client_test=np.array(["ann", "bob", "eve", "eve", "ann", "fay", "cyd", "cyd"]),
        **fields,
    )


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"natural"}))
def test_every_partition_serves_every_client(kind: str) -> None:
    data = federate(DIGITS, DataSettings(clients=10, partition=kind), Seeds(1))
    assert data.num_clients == len(data.sizes) == 10
    assert data.sizes.min() >= 2
    counts = data.label_counts()
    for client in range(10):
        examples = data.client(client)
        assert len(examples) == data.sizes[client]
        assert counts[client].tolist() == torch.bincount(examples.targets, minlength=10).tolist()
    if kind != "overlapping":
        assert counts.sum() == len(DIGITS.train)
    assert data.client_test(0) is None
    assert [tuple(part.shape) for part in data.example()] == [(2, 1, 8, 8), (2,)]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"natural"}))
def test_same_seed_same_split(kind: str) -> None:
    chosen = DataSettings(clients=10, partition=kind)
    prints = [federate(DIGITS, chosen, Seeds(seed)).fingerprint() for seed in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]
    assert prints[0].split("-")[0] == prints[2].split("-")[0]


def test_fingerprint_notices_a_changed_data_set() -> None:
    data = federate(small(), DataSettings(clients=4), Seeds(0))
    saved = data.fingerprint()
    data.check_fingerprint(saved)
    columns = (data.train.columns[0].clone(), data.train.columns[1])
    columns[0][3] += 1
    changed = dataclasses.replace(data, train=dataclasses.replace(data.train, columns=columns))
    with pytest.raises(FedtailorError, match="small changed since the run was saved: the examples differ"):
        changed.check_fingerprint(saved)
    other = federate(small(), DataSettings(clients=4), Seeds(5))
    with pytest.raises(FedtailorError, match="the split over clients differ"):
        other.check_fingerprint(saved)


def test_federated_data_travels_to_other_processes() -> None:
    data = federate(DIGITS, DataSettings(clients=5, local_test=0.2, augment=False), Seeds(0))
    assert pickle.loads(pickle.dumps(data)).fingerprint() == data.fingerprint()


def test_fingerprint_covers_texts_and_limits(tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    prints = []
    for text in ("abcabcabc" * 20, "abcabcabc" * 19 + "abcbbcabc"):
        path.write_text(json.dumps({"user": "a", "text": text}) + "\n")
        for limit in (None, 50):
            chosen = DataSettings(clients=2, limit=limit, augment=False)
            prints.append(
                federate(load_dataset(str(path), window=5), chosen, Seeds(0)).fingerprint().split("-")[0]
            )
    assert len(set(prints)) == 4


def test_limit_and_no_augmentation() -> None:
    preparation = ImagePreparation(padding=2, flip=True)
    images = torch.arange(50 * 36, dtype=torch.int64).remainder(256).to(torch.uint8).view(50, 1, 6, 6)
    examples = Examples.of(images, torch.arange(50) % 5, preparation=preparation)
    dataset = Dataset("images", examples, examples, 5)
    data = federate(dataset, DataSettings(clients=4, limit=20, augment=False), Seeds(0))
    assert len(data.train) == 20
    assert data.sizes.sum() == 20
    rows = torch.arange(5)
    client = data.client(0)
    plain = client.take(rows)[0]
    assert torch.equal(client.take(rows, generator=torch.Generator())[0], plain)
    augmented = federate(dataset, DataSettings(clients=4), Seeds(0)).client(0)
    assert not torch.equal(augmented.take(rows, generator=torch.Generator())[0], augmented.take(rows)[0])


def test_several_writers_are_one_client() -> None:
    owners = torch.arange(63).numpy() % 7
    names = torch.arange(9).numpy().astype(str)
    examples = Examples.of(torch.arange(63.0).view(63, 1), torch.arange(63) % 3)
    tested = owners.copy()
    tested[:5] = 8  # a writer whom nobody trains with
    dataset = Dataset(
        "rows", examples, examples, 3, client_train=owners, client_test=tested, client_names=names
    )
    data = federate(dataset, DataSettings(clients=3, partition="natural", makers_per_client=2), Seeds(0))
    assert data.client_names is not None
    for client in range(3):
        expected = {int(name) for name in str(data.client_names[client]).split("+")}
        for own in (data.client(client), data.examples_for(client, "evaluate")):
            made = own.take(torch.arange(len(own)))[0].view(-1).int() % 7
            assert set(made.tolist()) == expected
        assert len(data.client(client)) == 9 * len(expected)
    with pytest.raises(FedtailorError, match="clients = 5: expected at most 4"):
        federate(dataset, DataSettings(clients=5, partition="natural", makers_per_client=2), Seeds(0))


def test_fewer_test_examples_keep_their_owners() -> None:
    owners = torch.arange(60).numpy() % 6
    examples = Examples.of(torch.arange(60.0).view(60, 1), torch.arange(60) % 3)
    dataset = Dataset("rows", examples, examples, 3, client_train=owners, client_test=owners)
    chosen = DataSettings(clients=6, partition="natural", test_limit=24)
    data = federate(dataset, chosen, Seeds(0))
    assert len(data.train) == 60
    assert len(data.test) == 24
    for client in range(6):
        own = data.examples_for(client, "evaluate")
        made = own.take(torch.arange(len(own)))[0].view(-1).int() % 6
        assert (made == client).all()
    assert sum(len(data.examples_for(client, "evaluate")) for client in range(6)) == 24


@given(st.floats(0, 0.9), st.integers(1, 8), st.integers(0, 100))
@settings(max_examples=40)
def test_local_tests_are_held_back(share: float, clients: int, seed: int) -> None:
    chosen = DataSettings(clients=clients, partition="quantity", local_test=share, min_examples=2)
    data = federate(small(), chosen, Seeds(seed))
    assert data.sizes.min() >= 2
    held = list(data.partition.order)
    if share == 0:
        assert data.tests is None
    else:
        held += list(data.tests.partition.order)
        whole = data.sizes + data.tests.partition.sizes
        assert (data.tests.partition.sizes <= np.ceil(whole * share)).all()
    assert sorted(held) == list(range(40))


def test_natural_clients_with_their_tests_and_unseen_ones() -> None:
    data = federate(by_writer(), DataSettings(clients=3, partition="natural"), Seeds(0))
    assert [data.client_name(client) for client in range(3)] == ["ann", "bob", "cyd"]
    assert data.sizes.tolist() == [20, 15, 4]  # dan has fewer than min_examples
    assert [len(data.client_test(client)) for client in range(3)] == [2, 1, 2]
    assert data.unseen.names.tolist() == ["eve", "fay"]
    assert [len(data.unseen.part(client)) for client in range(len(data.unseen))] == [2, 1]
    assert data.unseen.part(0).take(torch.tensor([0]))[0].tolist() == [[2.0]]


def test_natural_clients_are_drawn() -> None:
    drawn = {
        tuple(federate(by_writer(), DataSettings(clients=2, partition="natural"), Seeds(seed)).client_names)
        for seed in range(20)
    }
    assert drawn == {("ann", "bob"), ("ann", "cyd"), ("bob", "cyd")}
    with pytest.raises(FedtailorError, match=r"at most 3.*1 more with fewer than min_examples = 2"):
        federate(by_writer(), DataSettings(clients=4, partition="natural"), Seeds(0))
    with pytest.raises(FedtailorError, match="who made each example"):
        federate(small(), DataSettings(partition="natural"), Seeds(0))


def test_a_client_without_tests_has_none() -> None:
    dataset = dataclasses.replace(by_writer(), client_test=np.array(["ann"] * 8))
    data = federate(dataset, DataSettings(clients=3, partition="natural"), Seeds(0))
    assert data.client_test(1) is None
    assert data.unseen is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partition": "dirichelt"}, "did you mean 'dirichlet'"),
        ({"clients": 0}, "clients = 0"),
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"alpha": float("inf")}, "alpha = inf"),
        ({"classes_per_client": 0}, "classes_per_client"),
        ({"shards_per_client": 0}, "shards_per_client"),
        ({"skew": -0.1}, "skew"),
        ({"examples_per_client": 0}, "examples_per_client"),
        ({"makers_per_client": 0}, "makers_per_client = 0"),
        ({"min_examples": 0}, "min_examples"),
        ({"local_test": 1.0}, "local_test"),
        ({"limit": 0}, "limit = 0"),
        ({"test_limit": 0}, "test_limit = 0"),
    ],
)
def test_wrong_settings_are_refused(fields, words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        DataSettings(**fields)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (DataSettings(clients=41), "at most 40 for 40 training examples"),
        (DataSettings(clients=30), "has 1 example.*min_examples = 2"),
        (DataSettings(clients=30, partition="dirichlet"), "at most 20 for 40"),
        (DataSettings(clients=3, partition="classes", classes_per_client=1), "cover all 4 classes"),
        (DataSettings(clients=30, partition="shards"), "at most 20 for 40"),
    ],
)
def test_impossible_splits_are_refused(chosen: DataSettings, words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        federate(small(), chosen, Seeds(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: small(classes=4, client_train=np.zeros(3, int)),
            "client_train of small has 3 entries: expected 40",
        ),
        (lambda: small(client_test=np.zeros(8)), "client_test of small is of type float64"),
        (
            lambda: small(client_train=np.zeros(40, int), client_test=np.array(["a"] * 8)),
            "expected the same kind",
        ),
        (
            lambda: small(client_train=np.full(40, 2), client_names=np.array(["a"])),
            "from 2 to 2: expected 0 to 0",
        ),
        (lambda: dataclasses.replace(small(), num_classes=3), "label 3 of example 3 in small"),
        (lambda: dataclasses.replace(small(), train=Examples.of([[1.0]], [-1])), "label -1 of example 0"),
        (lambda: dataclasses.replace(small(), train=small().train.subset([])), "no training examples"),
    ],
)
def test_inconsistent_data_sets_are_refused(make, words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        make()


def test_own_examples_by_parts() -> None:
    dataset = small()
    data = FederatedData.from_examples(dataset.train, dataset.test, parts=[[0, 1, 2], [5, 6]])
    assert data.client(1).targets.tolist() == [1, 2]
    assert data.num_classes == 4
    with pytest.raises(FedtailorError, match="client 1 has no data"):
        FederatedData.from_examples(dataset.train, dataset.test, parts=[[0], []])
    with pytest.raises(FedtailorError, match="example 40 of the partition: expected 0 to 39"):
        FederatedData.from_examples(dataset.train, dataset.test, parts=[[40]])


def test_own_examples_by_ids_and_by_partition() -> None:
    dataset = by_writer()
    data = FederatedData.from_examples(
        dataset.train, dataset.test, client_train=dataset.client_train, client_test=dataset.client_test
    )
    assert data.client_names.tolist() == ["ann", "bob", "cyd", "dan"]
    assert data.unseen.names.tolist() == ["eve", "fay"]
    spread = FederatedData.from_examples(
        dataset.train, dataset.test, clients=5, partition="dirichlet", alpha=1.0
    )
    assert spread.num_clients == 5
    with pytest.raises(FedtailorError, match="label 3 of example 3 in mine"):
        FederatedData.from_examples(dataset.train, dataset.test, clients=2, num_classes=2, dataset="mine")
    with pytest.raises(FedtailorError, match="did you mean 'classes'"):
        FederatedData.from_examples(dataset.train, dataset.test, clients=2, partition="clases")


def test_targets_that_are_no_classes() -> None:
    examples = Examples.of(torch.zeros(20, 2), torch.rand(20))
    data = FederatedData.from_examples(examples, examples, clients=4)
    assert data.num_classes == 0
    with pytest.raises(FedtailorError, match="targets are no classes"):
        data.label_counts()
    with pytest.raises(FedtailorError, match="partition = 'dirichlet'"):
        FederatedData.from_examples(examples, examples, clients=4, partition="dirichlet")


def test_more_clients_than_examples() -> None:
    data = federate(
        small(), DataSettings(clients=1000, partition="overlapping", examples_per_client=5), Seeds(0)
    )
    assert data.num_clients == 1000
    assert len(data.client(999)) == 5


def test_moving_keeps_what_is_shared() -> None:
    data = federate(by_writer(), DataSettings(clients=2, partition="natural"), Seeds(0)).to("cpu")
    assert data.tests.examples is data.test is data.unseen.examples
    held = federate(small(), DataSettings(clients=2, local_test=0.5), Seeds(0)).to("cpu")
    assert held.tests.examples is held.train
    assert held.unseen is None
