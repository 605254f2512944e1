from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from fedtailor.data.batches import Examples, batch_size, inputs_of, target_of
from fedtailor.data.transforms import ImagePreparation
from fedtailor.errors import FedtailorError


def test_take_gathers_rows_and_gives_int64_labels() -> None:
    examples = Examples.of(np.arange(12, dtype=np.uint8).reshape(6, 2), np.arange(6, dtype=np.uint8))
    x, y = examples.take(torch.tensor([4, 0]))
    assert x.tolist() == [[8, 9], [0, 1]]
    assert y.tolist() == [4, 0]
    assert y.dtype == torch.int64
    assert examples.targets.dtype == torch.int64


def test_subset_of_subset_shares_the_columns() -> None:
    examples = Examples.of(torch.arange(10.0).view(10, 1), torch.arange(10))
    inner = examples.subset(np.array([9, 7, 5, 3], dtype=np.int32)).subset([3, 0])
    assert inner.targets.tolist() == [3, 9]
    assert len(inner) == 2
    assert inner.take(torch.tensor([1]))[0].tolist() == [[9.0]]
    assert inner.columns[0].data_ptr() == examples.columns[0].data_ptr()


def test_dict_columns() -> None:
    examples = Examples.named({"left": [[1.0], [2.0]], "right": [[3.0], [4.0]], "label": [0, 1]})
    batch = examples.take(torch.tensor([1]))
    assert inputs_of(batch)[1].keys() == {"left", "right"}
    assert target_of(batch).tolist() == [1]
    assert batch_size(batch) == 1


def test_preparation_augments_only_with_a_generator_and_moves_along() -> None:
    calls = []

    def preparation(batch, generator):
        calls.append(generator)
        return batch

    examples = Examples.of([[1.0]], [0], preparation=preparation)
    generator = torch.Generator()
    examples.take(torch.tensor([0]))
    examples.subset([0]).take(torch.tensor([0]), generator=generator)
    assert calls == [None, generator]
    assert examples.to("cpu").preparation is preparation


def test_examples_pickle_with_their_preparation() -> None:
    examples = Examples.of(np.zeros((3, 1, 4, 4), np.uint8), [0, 1, 0], preparation=ImagePreparation())
    copy = pickle.loads(pickle.dumps(examples.subset([2])))
    assert torch.equal(copy.take(torch.tensor([0]))[0], torch.zeros(1, 1, 4, 4))


def test_float64_arrays_become_float32_and_tensors_stay() -> None:
    assert Examples.of(np.zeros((1, 2)), [0]).columns[0].dtype == torch.float32
    assert Examples.of(torch.zeros(1, 2, dtype=torch.float64), [0]).columns[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Examples((torch.zeros(2),)), "1 column"),
        (lambda: Examples.of(torch.zeros(2, 1), torch.zeros(3)), "lengths"),
        (lambda: Examples.named({"x": [1], "z": [1]}), "target"),
        (lambda: Examples.of([["a"]], [0]), "numbers"),
        (lambda: Examples.of(torch.zeros(2, 1), torch.zeros(2)).subset([2]), "0 to 1"),
        (lambda: Examples((torch.zeros(2, 1), torch.zeros(2)), torch.zeros(1)), "int64"),
        (lambda: Examples((torch.zeros(2, 1), torch.tensor(3))), "single number"),
    ],
)
def test_wrong_columns_are_refused(make, words) -> None:
    with pytest.raises(FedtailorError, match=words):
        make()


class Pairs(TorchDataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_any_map_style_dataset() -> None:
    examples = Examples.from_dataset(Pairs([(np.full((1, 2), i), i % 2) for i in range(5)]))
    x, y = examples.take(torch.tensor([3]))
    assert x.shape == (1, 1, 2)
    assert y.tolist() == [1]
    named = Examples.from_dataset(Pairs([{"x": torch.zeros(3), "y": torch.tensor(i)} for i in range(4)]))
    assert named.targets.tolist() == [0, 1, 2, 3]
    tensors = torch.zeros(4, 2), torch.arange(4)
    assert Examples.from_dataset(TensorDataset(*tensors)).columns[0] is tensors[0]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "without items"),
        ([1, 2], "expected \\(inputs, target\\)"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "item 1 has shape"),
        ([(torch.zeros(2), 0), (torch.zeros(2), 0, 0)], "item 1 has 3 entries"),
        ([(object(), 0)], "transform that makes tensors"),
    ],
)
def test_unusable_datasets_are_refused(items, words) -> None:
    with pytest.raises(FedtailorError, match=words):
        Examples.from_dataset(Pairs(items))
