"""The pictures that come with the package: what they are, and how they were made."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtailor.data import load_dataset
from fedtailor.data.catalogue.embedded import CONTENT, FILE, content_of
from fedtailor.data.catalogue.mnist import FASHION_MNIST
from fedtailor.data.formats.npz import read_npz

SCRIPT = Path(__file__).parents[2] / "tools" / "embed_fashion_mnist.py"
DATA = Path(os.environ.get("FEDTAILOR_DATA", "/nowhere"))


def script() -> Any:
    specification = importlib.util.spec_from_file_location("embed_fashion_mnist", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_file_is_small_whole_and_licensed():
    assert FILE.stat().st_size <= 4_000_000
    assert content_of(read_npz(FILE)) == CONTENT
    assert "Zalando SE" in (FILE.parent / "LICENSE-fashion-mnist").read_text(encoding="utf-8")


def test_as_many_images_of_each_class_prepared_as_the_whole_set(monkeypatch):
    monkeypatch.setenv("FEDTAILOR_OFFLINE", "1")
    data = load_dataset("fashion-mnist-8k")
    assert data.name == "fashion-mnist-8k"
    assert data.label_names == FASHION_MNIST.label_names
    assert data.train.targets.bincount().tolist() == [600] * 10
    assert data.test.targets.bincount().tolist() == [200] * 10
    assert data.train.preparation == FASHION_MNIST.preparation


def test_first_images_of_each_class_are_taken_in_their_order():
    labels = np.array([*range(10), 3, 3, *range(10)])
    assert script().first_of_each_class(labels, 1).tolist() == list(range(10))
    assert script().first_of_each_class(labels, 2).tolist() == [*range(11), 12, 13, 14, *range(16, 22)]


@pytest.mark.skipif(not (DATA / "fashion-mnist").is_dir(), reason="needs Fashion-MNIST's own files")
def test_the_script_makes_the_file_from_the_published_ones():
    assert content_of(script().chosen(DATA)) == CONTENT
