from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from published_files import png, some_images, write_lines

from fedtailor.data import DataSettings, federate, load_dataset
from fedtailor.errors import FedtailorError
from fedtailor.seeds import Seeds


def save(path: Path, **changes) -> str:
    arrays = {
        "x_train": some_images(12, 6, 6, 3),
        "y_train": np.arange(12) % 3,
        "x_test": some_images(4, 6, 6, 3, seed=1),
        "y_test": np.arange(4) % 3,
    }
    np.savez(path, **{**arrays, **changes})
    return str(path)


def test_npz_of_images(tmp_path: Path) -> None:
    dataset = load_dataset(save(tmp_path / "mine.npz"), padding=1, flip=True)
    assert dataset.name == "mine.npz"
    assert dataset.num_classes == 3
    assert dataset.train.columns[0].dtype == torch.uint8
    x, _ = dataset.train.take(torch.arange(12))
    assert x.shape == (12, 3, 6, 6)
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), unbiased=False), torch.ones(3), atol=1e-5)


def test_npz_with_clients_names_and_unseen_clients(tmp_path: Path) -> None:
    path = save(
        tmp_path / "mine.npz",
        y_train=np.array(["cat", "dog"] * 6),
        y_test=np.array(["dog", "emu", "cat", "cat"]),
        client_train=np.array([7] * 6 + [9] * 6),
        client_test=np.array([7, 9, 11, 11]),
    )
    dataset = load_dataset(path)
    assert dataset.label_names == ("cat", "dog", "emu")
    data = federate(dataset, DataSettings(clients=2, partition="natural"), Seeds(0))
    assert [data.client_name(client) for client in range(2)] == ["7", "9"]
    assert data.unseen.names.tolist() == [11]


def test_npz_of_anything_else(tmp_path: Path) -> None:
    floats = load_dataset(save(tmp_path / "a.npz", x_train=np.zeros((12, 5)), x_test=np.zeros((4, 5))))
    assert floats.train.take(torch.tensor([0]))[0].dtype == torch.float32
    tokens = load_dataset(
        save(tmp_path / "b.npz", x_train=np.zeros((12, 5), np.uint8), x_test=np.zeros((4, 5), np.uint8))
    )
    assert tokens.train.take(torch.tensor([0]))[0].dtype == torch.int64
    grey = load_dataset(save(tmp_path / "c.npz", x_train=some_images(12, 6, 6), x_test=some_images(4, 6, 6)))
    assert grey.train.take(torch.tensor([0]))[0].shape == (1, 1, 6, 6)


def test_what_is_said_of_a_file_is_about_it(tmp_path: Path) -> None:
    def said(*shape: int, kind: type = np.float32) -> str:
        arrays = {"x_train": np.zeros((12, *shape), kind), "x_test": np.zeros((4, *shape), kind)}
        return " ".join(load_dataset(save(tmp_path / "a.npz", **arrays)).origin.sentences)

    assert said(5).endswith("3 classes.")
    assert "If they are pixels, store bytes" in said(3, 6, 6)
    assert "measurements" not in said(3, 6, 6, kind=np.uint8)
    assert "If they are measurements, store decimal numbers" in said(5, kind=np.int64)
    prices = {"y_train": np.arange(12) * 1e4, "y_test": np.arange(4) * 1e4}
    scaled = load_dataset(save(tmp_path / "a.npz", **prices), standardise_targets=True)
    assert scaled.origin.targets["mean"] == [55000]
    write_lines(tmp_path / "r.jsonl", [{"x": [i, 1], "y": i * 1000} for i in range(10)])
    rows = load_dataset(str(tmp_path / "r.jsonl"), standardise_targets=True)
    assert (rows.num_classes, rows.origin.targets["mean"]) == (0, [4000])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_train": np.arange(11)}, "lengths"),
        ({"client_train": np.arange(3)}, "3 entries: expected 12"),
        ({"y_test": np.array([0, 1, 2, -1])}, "label -1"),
    ],
)
def test_wrong_npz(tmp_path: Path, changes, words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        load_dataset(save(tmp_path / "mine.npz", **changes))
    with pytest.raises(FedtailorError, match="label 2"):
        load_dataset(save(tmp_path / "mine.npz"), num_classes=2)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    records = [
        {
            "x": [i, i + 1],
            "y": "even" if i % 2 == 0 else "odd",
            "client": f"c{i % 3}",
            "split": "test" if i > 7 else "train",
        }
        for i in range(10)
    ]
    write_lines(path, records)
    dataset = load_dataset(str(path))
    assert dataset.label_names == ("even", "odd")
    assert (len(dataset.train), len(dataset.test)) == (8, 2)
    assert dataset.client_test.tolist() == ["c2", "c0"]
    write_lines(path, [{"age": i, "pay": 0.5, "label": i % 2} for i in range(10)])
    assert load_dataset(str(path)).origin.columns == ("age", "pay")
    write_lines(path, [{"x": [i], "y": i % 2} for i in range(10)])
    assert load_dataset(str(path)).test.targets.tolist() == [0, 1]  # every fifth


def test_json_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    write_lines(path, [{"user": "a", "text": "αβγ " * 30}, {"user": "b", "text": "xyz " * 30}])
    dataset = load_dataset(str(path), window=12)
    assert set(dataset.label_names) == set("αβγxyz ")
    assert dataset.train.take(torch.tensor([0]))[0].shape == (1, 12)
    assert dataset.client_names.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "holds no lines"),
        ('{"x": [1], "y": 0}\n{broken\n', "line 2 of .* is not JSON"),
        ("[1, 2]\n", "expected an object"),
        ('{"x": [1]}\n', "expected x, y"),
        ('{"x": [1], "y": 0, "split": "valid"}\n', "split = train or test"),
        ('{"x": [1], "y": 0}\n{"x": [1, 2], "y": 0}\n', "different shapes"),
        ('{"x": [1], "y": 0, "client": 1}\n{"x": [1], "y": 0}\n', "on all or on none"),
        ('{"user": "a", "text": "b"}\n{"user": "a"}\n', "line 2 .*expected user and text"),
    ],
)
def test_wrong_json_lines(tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "rows.jsonl").write_text(lines)
    with pytest.raises(FedtailorError, match=words):
        load_dataset(str(tmp_path / "rows.jsonl"))


def write_images(folder: Path, *names: str, size: int = 8) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(some_images(1, size, size, 3, seed=number)[0]))


def test_image_folder(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    write_images(tmp_path / "a", "train/cat/1.png", "train/dog/2.png", "train/dog/3.png", "test/dog/4.png")
    dataset = load_dataset(str(tmp_path / "a"))
    assert dataset.label_names == ("cat", "dog")
    assert dataset.train.targets.tolist() == [0, 1, 1]
    assert np.array_equal(dataset.train.columns[0][0].numpy(), some_images(1, 8, 8, 3)[0].transpose(2, 0, 1))
    assert load_dataset(str(tmp_path / "a"), size=6).train.take(torch.tensor([0]))[0].shape == (1, 3, 6, 6)
    scaled = load_dataset(str(tmp_path / "a"), size=(4, 5), mode="L")
    assert scaled.train.take(torch.tensor([0]))[0].shape == (1, 1, 4, 5)
    write_images(
        tmp_path / "b", *(f"{who}/{what}/{n}.png" for who in "xy" for what in "pq" for n in range(5))
    )
    clients = load_dataset(str(tmp_path / "b"))
    assert sorted(set(clients.client_train)) == ["x", "y"]
    assert len(clients.test) == 4
    write_images(tmp_path / "b", "x/p/large.png", size=9)
    with pytest.raises(FedtailorError, match="give size"):
        load_dataset(str(tmp_path / "b"))
    write_images(tmp_path / "a", "train/stray.png")
    with pytest.raises(FedtailorError, match=r"0 folders deep \(train/stray.png\) and 1 folders deep"):
        load_dataset(str(tmp_path / "a"))
    (tmp_path / "a" / "train" / "stray.png").write_bytes(b"no image")
    with pytest.raises(FedtailorError, match=r"stray.png: cannot be read as an image\. "):
        load_dataset(str(tmp_path / "a"))
    write_images(tmp_path / "flat", "1.png", "2.png")
    with pytest.raises(
        FedtailorError, match=r"in no folder of a class \(1.png\): expected a folder for each class"
    ):
        load_dataset(str(tmp_path / "flat"))


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("absent.npz", "no/such/folder"):
        first = absent.split("/")[0]
        with pytest.raises(FedtailorError, match=f"no such file or folder; {tmp_path} has no '{first}'"):
            load_dataset(str(tmp_path / absent))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FedtailorError, match=f"unknown dataset 'picz'.*there is none called 'picz' in {tmp_path}"
    ):
        load_dataset("picz")
    (tmp_path / "table.xls").write_text("a,b")
    with pytest.raises(FedtailorError, match=r"unknown kind of data file '.xls'"):
        load_dataset(str(tmp_path / "table.xls"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedtailorError, match="holds no image files"):
        load_dataset(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flop": True}, "did you mean 'flip'"),
        ({"flip": 1}, "flip = 1 of mine.npz: expected a value like False"),
        ({"padding": True}, "padding = True"),
        ({"num_classes": -1}, "num_classes = -1"),
        ({"num_classes": "many"}, "num_classes = 'many'"),
    ],
)
def test_wrong_options(tmp_path: Path, options, words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        load_dataset(save(tmp_path / "mine.npz"), **options)


def test_wrong_options_of_folders(tmp_path: Path) -> None:
    for options, words in (
        ({"mode": "CMYK"}, "mode"),
        ({"size": [3]}, "size"),
        ({"size": "a"}, "size"),
        ({"size": 0}, "size"),
    ):
        with pytest.raises(FedtailorError, match=words):
            load_dataset(str(tmp_path), **options)
