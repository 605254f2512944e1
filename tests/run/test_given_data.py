"""Data as users have it: every spelling becomes federated data, or a sentence says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from fedtailor.data.batches import Examples
from fedtailor.errors import FedtailorError
from fedtailor.run.given_data import federated
from fedtailor.seeds import Seeds

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3


class Own(Dataset):
    """Map-style, without tensors of its own."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


class Named(Own):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": X[index], "label": Y[index]}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(X[0], Y[0])])


def halves() -> list[TensorDataset]:
    return [TensorDataset(X[:30], Y[:30]), TensorDataset(X[30:], Y[30:])]


ONE_PART: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "a list of two": lambda: [X, Y],
    "named columns": lambda: {"features": X, "label": Y},
    "examples": lambda: Examples.of(X, Y),
    "a TensorDataset": lambda: TensorDataset(X, Y),
    "a map-style data set": Own,
    "named items": Named,
    "a subset": lambda: Subset(Own(), range(60)),
    "a list of items": lambda: [(X[row], int(Y[row])) for row in range(60)],
}


@pytest.mark.parametrize("spelling", ONE_PART)
def test_one_part_is_spread_over_clients_and_every_fifth_example_is_for_testing(spelling):
    data = federated(ONE_PART[spelling](), Seeds(0))
    assert (data.num_clients, len(data.train), len(data.test), data.num_classes) == (20, 48, 12, 3)
    everything = data.test.take(torch.arange(12))
    inputs = everything["features"] if isinstance(everything, dict) else everything[0]
    assert torch.equal(inputs, X[4::5])


def test_the_same_data_is_spread_alike_however_it_is_spelt():
    first, second = (federated(each, Seeds(3)) for each in ((X, Y), Own()))
    assert np.array_equal(first.partition.order, second.partition.order)
    assert torch.equal(first.client(4).targets, second.client(4).targets)


@pytest.mark.parametrize(
    "given",
    [
        ((X[:40], Y[:40]), (X[40:], Y[40:])),
        {"train": TensorDataset(X[:40], Y[:40]), "test": TensorDataset(X[40:], Y[40:])},
        tuple(random_split(Own(), [40, 20])),
    ],
)
def test_a_pair_of_parts_is_for_training_and_testing(given):
    data = federated(given, Seeds(0))
    assert (data.num_clients, len(data.train), len(data.test)) == (20, 40, 20)


def test_one_part_for_each_client():
    data = federated(halves(), Seeds(0))
    assert (data.num_clients, data.sizes.tolist(), len(data.test)) == (2, [24, 24], 12)
    own = data.client_test(1)
    assert own is not None
    assert torch.equal(own.take(torch.arange(6))[0], X[34::5])
    shared = federated((halves(), TensorDataset(X[:9], Y[:9])), Seeds(0))
    assert (shared.sizes.tolist(), len(shared.test), shared.tests) == ([30, 30], 9, None)


def test_clients_by_name_stay_in_their_order():
    data = federated({"zoe": (X[:40], Y[:40]), "anna": (X[40:], Y[40:])}, Seeds(0))
    assert [data.client_name(number) for number in range(2)] == ["zoe", "anna"]
    assert data.sizes.tolist() == [32, 16]


def test_settings_of_a_config_say_how_examples_are_spread():
    data = federated({"dataset": (X, Y), "clients": 6, "partition": "shards"}, Seeds(0))
    assert data.num_clients == 6
    assert (data.label_counts() > 0).sum(1).max() <= 3
    named = federated({"dataset": "digits", "clients": 4, "limit": 40}, Seeds(0))
    assert (named.name, named.num_clients, len(named.train)) == ("digits", 4, 40)
    assert federated((X[:10], Y[:10]), Seeds(0)).num_clients == 4  # of 8 examples, two each


def test_a_loader_is_its_data_set_and_that_is_said():
    with pytest.warns(UserWarning, match="of a DataLoader the data set is used, and not its batches"):
        data = federated([DataLoader(each, batch_size=4) for each in halves()], Seeds(0))
    assert data.sizes.tolist() == [24, 24]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (X, r"data: a Tensor without targets: expected \(x, y\), the targets last"),
        ((X[:40], X[40:], Y[:40], Y[40:]), r"lengths 20, 40: .*\(\(x_train, y_train\), \(x_test, y_test\)\)"),
        (Stream(), "data: a Stream has no length and no order; expected a map-style data set"),
        (DataLoader(Own(), collate_fn=lambda items: items), "a DataLoader with a collate_fn of its own"),
        (None, "data: an object of type NoneType; expected the name of a data set, a path"),
        ([], "examples with 0 column"),
        ([*halves(), 5], "data of client 2: an object of type int"),
        ([halves()[0], TensorDataset(X[:, :5], Y)], r"client 1 is float32\(5,\), int64\(\): .*like that of client 0"),
        ((["a film"] * 60, ["good"] * 60), r"a column of texts \('a film' ...\).*\.csv or \.jsonl .*Vocabulary.of"),
        ([(X[row], "cat") for row in range(60)], "item 0 holds the text 'cat': expected numbers; pass .x, y."),
        (((X, ["cat"] * 60), (X, Y)), "data, the test part: targets that are no names, though others are"),
        (([X[0], X[0, :5]] * 30, Y), r"example 1 has the shape \(5,\), and example 0 the shape \(6,\)"),
        (([[1, 2], [1]] * 30, Y), r"example 1 has the shape \(1,\), .* expected one shape for all"),
        (([[[1, 2], [1]]] * 60, Y), "example 0 has lists of different lengths"),
        ({"dataset": (X, Y), "client": 3}, r"unknown key in \[data\] 'client': did you mean 'clients'"),
        ({"dataset": (X, Y), "clients": "many"}, "data.clients = 'many': input should be a valid integer"),
        ((X[:1], Y[:1]), "data with 1 example"),
        ((X, Y, X, Y), r"data: four tensors, .* expected \(\(x_train, y_train\), \(x_test, y_test\)\)"),
        ({"dataset": (X, Y), "options": {"label": "y"}}, r"data.options \(label\) .* files .* in memory"),
    ],
)  # fmt: skip
def test_what_is_no_data_is_refused_with_what_to_pass(given, words):
    with pytest.raises(FedtailorError, match=words):
        federated(given, Seeds(0))


def test_the_test_part_is_its_rows_alone() -> None:
    data = federated((X, Y), Seeds(0))
    x, y = data.test.raw
    assert torch.equal(x, X[4::5])
    assert torch.equal(y, Y[4::5])
    assert repr(data.test) == "12 examples: float32 (6), int64"


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (60, *shape)).astype(np.uint8)


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8), (8, 8, 3), (5,)])
def test_bytes_are_what_they_are_in_a_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x, y = pixels(*shape), Y.numpy()
    np.savez(tmp_path / "mine.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    file = federated(tmp_path / "mine.npz", Seeds(0))
    given = federated(((x[:40], y[:40]), (torch.from_numpy(x[40:]), y[40:])), Seeds(0))
    for first, second in ((file.train, given.train), (file.test, given.test)):
        expected, found = first.take(torch.arange(20))[0], second.take(torch.arange(20))[0]
        assert torch.equal(expected, found)
        assert expected.dtype == found.dtype
    assert file.inputs() == given.inputs()
    if len(shape) > 1:
        assert given.notices[0].startswith("own data is taken for images (")


def test_images_by_name_and_of_clients_are_normalised_with_what_is_for_training() -> None:
    x = pixels(8, 8, 3)
    named = federated({"pixels": x, "label": Y}, Seeds(0))
    parts = federated([(x[:30], Y[:30]), (x[30:], Y[30:])], Seeds(0))
    assert named.example()["pixels"].shape == (2, 3, 8, 8)
    for data in (named, parts):
        kept = [row for row in range(60) if row % 5 != 4]
        assert data.preparation.mean[0] == pytest.approx(x[kept, ..., 0].mean() / 255)
    by_hand = federated(Examples.of(x, Y), Seeds(0))
    assert by_hand.preparation is None
    assert by_hand.example()[0].dtype == torch.uint8


def test_half_precision_becomes_the_type_of_the_models() -> None:
    for half in (X.half(), X.bfloat16(), X.numpy().astype(np.float16)):
        assert federated((half, Y), Seeds(0)).example()[0].dtype == torch.float32


def test_names_are_classes_the_same_for_all_parts() -> None:
    animals = np.array(["cat", "dog", "emu"])[Y.numpy()]
    data = federated((X, animals.tolist()), Seeds(0))
    assert (data.num_classes, data.label_names) == (3, ("cat", "dog", "emu"))
    assert torch.equal(data.test.targets, Y[4::5])
    clients = {"anna": (X[:30], animals[:30].astype(object)), "ben": (X[30:], ["emu"] * 30)}
    parts = federated(clients, Seeds(0))
    assert set(parts.client(1).targets.tolist()) == {2}
    assert federated({"features": X, "label": animals}, Seeds(0)).label_names == data.label_names


def test_a_data_frame_is_told_how_to_be_passed() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": X[:, 0], "pay": X[:, 1], "city": "Rome", "label": ["a", "b", "c"] * 20})
    with pytest.raises(FedtailorError, match=r"""\(df.drop\(columns="label"\), df\["label"\]\)"""):
        federated(frame, Seeds(0))
    with pytest.raises(FedtailorError, match="the columns city hold no numbers"):
        federated((frame.drop(columns="label"), frame["label"]), Seeds(0))
    data = federated((frame[["age", "pay"]], frame["label"]), Seeds(0))
    assert (data.label_names, tuple(data.example()[0].shape)) == (("a", "b", "c"), (2, 2))
