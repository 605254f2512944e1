"""Odd examples are told before a run, each in one sentence with its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor.data import Dataset, Examples, FederatedData, load_dataset
from fedtailor.data.scan import BLOCK, findings
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from helpers import tiny_mlp


def examples(count: int = 120, **changes: object) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32)
    return x, np.arange(count) % 3


def federated(
    x: np.ndarray, y: np.ndarray, test: np.ndarray | None = None, **settings: object
) -> FederatedData:
    tests = examples(30)
    return FederatedData.from_examples(
        Examples.of(x, y), Examples.of(tests[0] if test is None else test, tests[1]),
        **{"dataset": "mine", "clients": 4, **settings},
    )  # fmt: skip


def test_nothing_is_said_of_good_data() -> None:
    assert federated(*examples()).findings == ()
    odd = Examples.of(np.full((4, 5), np.nan), [0, 0, 0, 9])
    assert findings(Dataset("of the catalogue", odd, odd, 10)) == ()


def test_nan_and_infinity_with_their_rows_and_clients() -> None:
    x, y = examples()
    x[7, 2], x[9, 0] = np.nan, -np.inf
    test = examples(30)[0]
    test[4, 1] = np.nan
    owners = np.array(["anna", "bert"] * 60)
    found = federated(x, y, test, client_train=owners, clients=2).findings
    assert found[0].startswith(
        "mine has NaN in the inputs (feature 2) of 1 training example (row 7): a client"
    )
    assert found[1].startswith(
        "mine has infinite numbers in the inputs (feature 0) of 1 training example (row 9)"
    )
    assert found[2] == (
        "mine has NaN in the inputs (feature 1) of 1 test example (row 4): loss and metrics of every tier will be "
        "no numbers; correct them or leave them out"
    )
    assert found[3] == "examples that are no numbers are held by client bert"
    by_hand = federated(x, y, parts=[[0, 1, 7], [2, 3], [9]]).findings
    assert by_hand[-1] == "examples that are no numbers are held by clients 0, 2"


def test_rows_are_found_in_every_block() -> None:
    x, y = examples(BLOCK + 50)
    x[BLOCK + 7] = np.nan
    assert f"(row {BLOCK + 7})" in federated(x, y).findings[0]


def test_one_stray_label_makes_classes_and_is_told(tmp_path: Path) -> None:
    lines = [f"{row},{row % 7},{row % 3}" for row in range(100)]
    lines[40] = "40,5,9"
    (tmp_path / "mine.csv").write_text("a,b,label\n" + "\n".join(lines))
    dataset = load_dataset(str(tmp_path / "mine.csv"))
    assert dataset.num_classes == 10
    (sentence,) = findings(dataset)
    assert sentence == (
        "of the 10 classes of mine.csv, 6 have no training example (3 to 8), though the network gets an output for "
        "each; class 9, the highest, has 1 (line 42), which may be a mistake"
    )


def test_rare_classes_and_classes_of_the_test_part_alone() -> None:
    x, y = examples()
    y[5] = 3
    (rare,) = federated(x, y).findings
    assert rare == "class 3 of mine has 1 training example of 120 (row 5)"
    few = federated(x[y < 2], y[y < 2]).findings
    assert few[0].startswith("of the 3 classes of mine, 1 has no training example (2)")
    assert few[1] == (
        "of the test examples of mine, 10 are of classes that training never shows (rows 2, 5, 8, 11, 14 and 5 more)"
    )


def test_constant_features_and_wrong_ranges() -> None:
    x, y = examples()
    x[:, 3] = 4
    assert federated(x, y).findings == (
        "feature 3 of mine is the same in every training example: nothing can be learnt from it",
    )
    assert "are the same in every training example" in federated(np.ones((60, 5)), y[:60]).findings[0]
    pixels = np.random.default_rng(0).uniform(0, 255, (60, 1, 4, 4)).astype(np.float32)
    pixels[33, 0, 2, 2] = 255
    (large,) = findings_of(pixels, y[:60])
    assert large.startswith("the inputs of own data go from")
    assert "to 255 (row 33): networks learn badly from numbers beyond 100" in large
    tokens = np.arange(300).reshape(60, 5) - 1
    (negative,) = findings_of(tokens, y[:60])
    assert "go from -1 to 298 (row 0): an embedding takes whole numbers from 0" in negative
    (whole,) = findings_of(examples(60)[0], y[:60].astype(np.float32))
    assert "decimal numbers that are all whole: taken for quantities" in whole


def findings_of(x: np.ndarray, y: np.ndarray) -> tuple[str, ...]:
    return FederatedData.from_examples(Examples.of(x, y), Examples.of(x, y), clients=2).findings


def test_a_model_is_traced_with_examples_that_are_numbers() -> None:
    x, y = examples()
    x[:3] = np.nan
    data = federated(x, y)
    assert torch.equal(data.example()[0], torch.from_numpy(x[3:5]))
    elastic(tiny_mlp(), data.example())
    x[:] = np.nan
    with pytest.raises(FedtailorError, match="the example batch has NaN in input 0"):
        elastic(tiny_mlp(), federated(x, y).example())
