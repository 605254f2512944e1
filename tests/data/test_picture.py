from __future__ import annotations

import io
import json

import numpy as np
import torch
from rich.console import Console

from fedtailor.data import DataSettings, Examples, FederatedData, federate, load_dataset
from fedtailor.data.picture import overview, rows, shades, show
from fedtailor.seeds import Seeds


def printed(data: FederatedData, most: int = 20, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(show(data, most))
    return output.getvalue()


def test_rows_and_overview_are_json_and_true() -> None:
    data = federate(
        load_dataset("digits"), DataSettings(clients=6, partition="classes", local_test=0.2), Seeds(0)
    )
    listed = json.loads(json.dumps(rows(data)))
    assert [row["client"] for row in listed] == list(range(6))
    assert [sum(row["label_counts"]) for row in listed] == data.sizes.tolist()
    assert all(row["own_test_examples"] > 0 for row in listed)
    numbers = json.loads(json.dumps(overview(data)))
    assert numbers["clients"] == 6
    assert numbers["mean_classes_per_client"] == 2
    assert numbers["skew"] > 0.7
    even = overview(federate(load_dataset("digits"), DataSettings(clients=2), Seeds(0)))
    assert even["skew"] < 0.1


def test_picture_shows_every_client_in_few_columns() -> None:
    data = federate(load_dataset("digits"), DataSettings(clients=6, partition="classes"), Seeds(0))
    text = printed(data)
    assert "digits: 6 clients, 1,442 training examples, 355 test examples, 10 classes" in text
    assert "0123456789" in text
    assert max(map(len, printed(data, width=80).splitlines())) <= 80
    assert text.count("━") > 6


def test_many_clients_and_classes_are_thinned() -> None:
    labels = torch.arange(3000) % 100
    examples = Examples.of(torch.zeros(3000, 1), labels)
    data = FederatedData.from_examples(
        examples,
        examples.subset([0, 1]),
        client_train=np.array([f"a person with a very long name {i % 300}" for i in range(3000)]),
        client_test=np.array(["somebody else", "another"]),
    )
    text = printed(data, most=5)
    assert "5 of them" in text
    assert "never seen in training: 2" in text
    assert "one column per 3 classes" in text
    assert "…" in text
    assert len(rows(data, most=5)) == 5


def test_targets_without_classes_have_no_shades() -> None:
    examples = Examples.of(torch.zeros(9, 1), torch.rand(9))
    data = FederatedData.from_examples(examples, examples, clients=3)
    assert "skew" not in overview(data)
    assert "━" in printed(data)


def test_shades() -> None:
    assert shades([0, 1, 26, 51, 100], 100) == " ░▒▓█"
    assert shades([0], 0) == " "
