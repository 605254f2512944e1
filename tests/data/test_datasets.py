from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published_files import write_mnist

from fedtailor.data import DataSettings, dataset_names, describe, load_dataset, load_federated
from fedtailor.data.sources import Edition, Source, register
from fedtailor.errors import FedtailorError
from fedtailor.seeds import Seeds

EXPECTED = {
    "cifar10",
    "cifar100",
    "cinic10",
    "digits",
    "fashion-mnist",
    "fashion-mnist-8k",
    "femnist",
    "mnist",
    "shakespeare",
    "svhn",
}


def test_all_sets_of_the_papers_are_known() -> None:
    assert set(dataset_names()) == EXPECTED
    assert all(describe(name) for name in EXPECTED)


def test_digits_need_no_file_and_never_change() -> None:
    dataset = load_dataset("digits")
    assert (len(dataset.train), len(dataset.test)) == (1442, 355)
    x, y = dataset.train.take(torch.arange(len(dataset.train)))
    assert x.shape == (1442, 1, 8, 8)
    assert x.dtype == torch.float32
    assert float(x.min()) == 0
    assert float(x.max()) == 1
    for part in (dataset.train, dataset.test):
        shares = torch.bincount(part.targets, minlength=10) / len(part)
        assert float(shares.min()) > 0.09
        assert float(shares.max()) < 0.11
    assert torch.equal(y, load_dataset("digits").train.targets)
    assert "embedded" in describe("digits")


def test_unknown_names_and_options() -> None:
    with pytest.raises(FedtailorError, match="unknown dataset 'cifar': did you mean 'cifar10'"):
        load_dataset("cifar")
    with pytest.raises(FedtailorError, match="unknown dataset"):
        describe("nothing")
    with pytest.raises(FedtailorError, match="unknown option of shakespeare 'windw': did you mean 'window'"):
        load_dataset("shakespeare", windw=3)
    with pytest.raises(FedtailorError, match="window = 'long' of shakespeare: expected a value like 80"):
        load_dataset("shakespeare", window="long")
    with pytest.raises(FedtailorError, match="unknown option of mnist"):
        load_dataset("mnist", window=3)


@pytest.mark.parametrize("name", sorted(EXPECTED - {"digits", "fashion-mnist-8k"}))
def test_a_missing_set_says_what_it_wants_and_where_it_looked(name: str, own_folders: Path) -> None:
    with pytest.raises(FedtailorError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert f"data set {name} was not found" in message
    assert str(own_folders) in message
    assert "cache" in message
    assert "system" in message
    assert "It wants " in message
    assert ("FEDTAILOR_OFFLINE is set" in message) == ("would be downloaded" in describe(name))


def test_several_folders(own_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "second" / "mnist")
    monkeypatch.setenv("FEDTAILOR_DATA", f"{own_folders}:{tmp_path / 'second'}")
    assert len(load_dataset("mnist").train) == 20


def test_a_name_is_registered_once() -> None:
    with pytest.raises(FedtailorError, match="registered twice"):
        register(Source("digits", "", (Edition((), lambda: None),)))


def test_load_federated() -> None:
    data = load_federated(DataSettings(clients=5, partition="dirichlet"), Seeds(0))
    assert data.num_clients == 5
