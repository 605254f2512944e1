"""Your own data in every form that fedtailor reads; each becomes clients, and the last one trains a model.

    python examples/your_own_data.py

Everything is written to a temporary folder and takes a few seconds.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset as TorchDataset

import fedtailor
from fedtailor.data import (
    DataSettings,
    Examples,
    FederatedData,
    ImagePreparation,
    load_dataset,
    load_federated,
)
from fedtailor.data.picture import show
from fedtailor.seeds import Seeds

generator = np.random.default_rng(0)
console = Console()


def some_pictures(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures (count, 12, 12) of a bright bar that lies (class 0) or stands (class 1)."""
    labels = generator.integers(0, 2, count)
    pictures = generator.integers(0, 90, (count, 12, 12), dtype=np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        where = generator.integers(2, 10)
        picture[(where, slice(None)) if label == 0 else (slice(None), where)] = 250
    return pictures, labels


def from_tensors() -> FederatedData:
    """Tensors (or arrays, or lists), spread over ten clients by a Dirichlet law."""
    x_train, y_train = some_pictures(600)
    x_test, y_test = some_pictures(200)
    # Bytes stay bytes in memory; the preparation makes floats of each batch, and augments in training.
    preparation = ImagePreparation(mean=(0.2,), std=(0.2,), padding=1)
    train = Examples.of(x_train[:, None], y_train, preparation=preparation)
    test = Examples.of(x_test[:, None], y_test, preparation=preparation)
    return FederatedData.from_examples(train, test, clients=10, partition="dirichlet", alpha=0.5)


class Readings(TorchDataset[tuple[torch.Tensor, int]]):
    """Any map-style PyTorch data set will do."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index % 2


def from_torch_dataset() -> FederatedData:
    """A PyTorch data set, with the examples of each client chosen by hand."""
    examples = Examples.from_dataset(Readings())
    parts = [list(range(50)), list(range(50, 90)), list(range(90, 100))]
    return FederatedData.from_examples(examples, examples.subset(list(range(100, 120))), parts=parts)


def from_npz(folder: Path) -> FederatedData:
    """One ``.npz``; who made each example is known, and the client 7 of the test part was never seen in training."""
    x_train, y_train = some_pictures(300)
    x_test, y_test = some_pictures(60)
    np.savez(
        folder / "mine.npz",
        x_train=x_train,
        y_train=y_train,
        client_train=generator.integers(0, 5, 300),
        x_test=x_test,
        y_test=y_test,
        client_test=np.repeat([0, 1, 2, 3, 4, 7], 10),
    )
    settings = DataSettings(dataset=str(folder / "mine.npz"), partition="natural", clients=5)
    data = load_federated(settings, Seeds(0))
    unseen = data.unseen
    assert unseen is not None
    console.print(f"client 0 tests on {len(data.client_test(0) or [])} examples of its own")
    console.print(f"never seen in training: client {unseen.names}, {len(unseen.part(0))} examples")
    return data


def from_json_lines(folder: Path) -> FederatedData:
    """One JSON object per line: ``x``, ``y`` (a number or a name), and if you like ``client`` and ``split``."""
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(200):
            numbers = [row % 7 / 7, row % 5 / 5]  # whole numbers would stay whole numbers, for embeddings
            record = {"x": numbers, "y": "odd" if row % 2 else "even", "client": f"phone {row % 4}"}
            file.write(json.dumps(record) + "\n")
    return load_federated(
        DataSettings(dataset=str(folder / "rows.jsonl"), partition="natural", clients=4), Seeds(0)
    )


def from_labelled_text(folder: Path) -> FederatedData:
    """JSON lines with ``text`` and ``label`` are classified; the vocabulary is made of the training part."""
    with (folder / "reviews.jsonl").open("w") as file:
        for row in range(100):
            text = f"A {'splendid' if row % 3 else 'dreary'} evening, number {row}."
            file.write(json.dumps({"text": text, "label": "good" if row % 3 else "bad"}) + "\n")
    return load_federated(DataSettings(dataset=str(folder / "reviews.jsonl"), clients=4), Seeds(0))


def from_table(folder: Path) -> FederatedData:
    """One row per example; the label is the column of that name, and every other column has to be numbers."""
    rows = [f"{row % 7},{1000 * (row % 5)},{'yes' if row % 2 else 'no'}" for row in range(100)]
    (folder / "table.csv").write_text("age,income,label\n" + "\n".join(rows))
    return load_federated(DataSettings(dataset=str(folder / "table.csv"), clients=4), Seeds(0))


def from_texts(folder: Path) -> FederatedData:
    """JSON lines with ``user`` and ``text`` become windows of characters; the next character is the target."""
    with (folder / "texts.jsonl").open("w") as file:
        for user in ("anna", "bert", "cleo"):
            file.write(json.dumps({"user": user, "text": f"{user} says this again and again. " * 30}) + "\n")
    settings = DataSettings(
        dataset=str(folder / "texts.jsonl"), partition="natural", clients=3, options={"window": 20}
    )
    return load_federated(settings, Seeds(0))


def from_image_folder(folder: Path) -> FederatedData:
    """Image files in ``[train|test]/[client]/class/``; needs the extra ``fedtailor[images]``."""
    from PIL import Image

    pictures, labels = some_pictures(100)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        place = folder / "photos" / f"camera {number % 4}" / ("lying" if label == 0 else "standing")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{number:03}.png")
    dataset = load_dataset(str(folder / "photos"), mode="L")
    console.print(
        f"classes {dataset.label_names}, {len(dataset.train)} for training, {len(dataset.test)} for testing"
    )
    settings = DataSettings(
        dataset=str(folder / "photos"), partition="natural", clients=4, options={"mode": "L"}
    )
    return load_federated(settings, Seeds(0))


def main() -> None:
    """Read each kind and show who holds what, then train on the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds: dict[str, Callable[[], FederatedData]] = {
            "tensors": from_tensors,
            "a PyTorch data set": from_torch_dataset,
            "an .npz file": lambda: from_npz(folder),
            "JSON lines": lambda: from_json_lines(folder),
            "labelled text": lambda: from_labelled_text(folder),
            "a table": lambda: from_table(folder),
            "JSON lines of text": lambda: from_texts(folder),
        }
        if importlib.util.find_spec("PIL") is not None:
            kinds["a folder of images"] = lambda: from_image_folder(folder)
        for title, make in kinds.items():
            console.rule(title)
            console.print(show(make()))
    console.rule("training on the tensors")
    module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 16, 2),
    )
    run = fedtailor.train(
        module, from_tensors(), rounds=5, training={"lr": 0.05, "epochs": 2, "batch_size": 16}
    )
    console.print(run.tiers)


if __name__ == "__main__":
    main()
