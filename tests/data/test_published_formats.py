"""Every loader on small files in the original format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from published_files import (
    cifar_records,
    femnist_user,
    png,
    python2_pickle,
    some_images,
    write_leaf,
    write_lines,
    write_mnist,
    write_tar,
)
from scipy.io import savemat

from fedtailor.data import Dataset, load_dataset
from fedtailor.data import files as files_module
from fedtailor.errors import FedtailorError


def raw(dataset: Dataset, part: str = "train") -> tuple[np.ndarray, list[int]]:
    examples = dataset.train if part == "train" else dataset.test
    return examples.columns[0].numpy(), examples.targets.tolist()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("ending", [".gz", ""])
def test_idx(own_folders: Path, name: str, ending: str) -> None:
    arrays = write_mnist(own_folders / name, ending=ending)
    dataset = load_dataset(name)
    images, labels = raw(dataset)
    assert np.array_equal(images[:, 0], arrays["train-images-idx3-ubyte"])
    assert labels == arrays["train-labels-idx1-ubyte"].tolist()
    assert len(dataset.test) == 10
    assert dataset.num_classes == len(dataset.label_names) == 10
    x, y = dataset.train.take(torch.arange(3))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    mean, std = dataset.train.preparation.mean[0], dataset.train.preparation.std[0]
    assert torch.allclose(x * std + mean, torch.from_numpy(images[:3]) / 255, atol=1e-6)


def test_idx_in_a_system_folder(own_folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_mnist(tmp_path / "system" / "fashion-mnist")
    assert len(load_dataset("fashion-mnist").train) == 20
    write_mnist(tmp_path / "cache" / "fedtailor" / "datasets" / "fashion-mnist", train=30)
    assert len(load_dataset("fashion-mnist").train) == 30
    write_mnist(own_folders / "fashion-mnist", train=40)
    assert len(load_dataset("fashion-mnist").train) == 40
    assert files_module.search_folders()[0] == own_folders


@pytest.mark.parametrize("form", ["folder", "archive"])
@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar10(own_folders: Path, form: str, kind: str) -> None:
    images = some_images(12, 3, 32, 32)
    labels = np.arange(12) % 10
    ending = ".bin" if kind == "binary" else ""
    names = [f"data_batch_{number}{ending}" for number in range(1, 6)] + [f"test_batch{ending}"]
    members = {}
    for number, name in enumerate(names):
        part = slice(2 * number, 2 * number + 2)
        members[name] = (
            cifar_records(images[part], labels[part])
            if kind == "binary"
            else python2_pickle(
                {
                    "batch_label": name,
                    "labels": labels[part].tolist(),
                    "data": images[part].reshape(2, -1),
                    "filenames": ["a.png", "b.png"],
                }
            )
        )
    folder = {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"}[kind]
    if form == "archive":
        write_tar(
            own_folders / f"cifar-10-{kind}.tar.gz", {f"{folder}/{name}": members[name] for name in members}
        )
    else:
        (own_folders / folder).mkdir()
        for name, content in members.items():
            (own_folders / folder / name).write_bytes(content)
    dataset = load_dataset("cifar10")
    assert np.array_equal(raw(dataset)[0], images[:10])
    assert raw(dataset)[1] == labels[:10].tolist()
    assert raw(dataset, "test")[1] == labels[10:].tolist()
    assert dataset.train.preparation.flip


@pytest.mark.parametrize("labels", ["fine", "coarse"])
@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar100(own_folders: Path, labels: str, kind: str) -> None:
    images = some_images(6, 3, 32, 32)
    coarse, fine = np.array([0, 19, 3, 4, 5, 6]), np.array([99, 0, 50, 1, 2, 3])
    folder = own_folders / ("cifar-100-binary" if kind == "binary" else "cifar-100-python")
    folder.mkdir()
    for name, part in (("train", slice(0, 4)), ("test", slice(4, 6))):
        entries = {
            "data": images[part].reshape(-1, 3072),
            "fine_labels": fine[part].tolist(),
            "coarse_labels": coarse[part].tolist(),
        }
        if kind == "binary":
            (folder / f"{name}.bin").write_bytes(cifar_records(images[part], coarse[part], fine[part]))
        else:
            (folder / name).write_bytes(python2_pickle(entries))
    dataset = load_dataset("cifar100", labels=labels)
    assert raw(dataset)[1] == {"fine": fine, "coarse": coarse}[labels][:4].tolist()
    assert np.array_equal(raw(dataset, "test")[0], images[4:])
    assert dataset.num_classes == len(set(dataset.label_names)) == {"fine": 100, "coarse": 20}[labels]
    with pytest.raises(FedtailorError, match="did you mean 'fine'"):
        load_dataset("cifar100", labels="fin")


def test_svhn(own_folders: Path) -> None:
    images = some_images(5, 32, 32, 3)
    for name, part in (("train", slice(0, 3)), ("test", slice(3, 5))):
        labels = np.array([[10], [1], [9], [5], [10]], dtype=np.uint8)[part]
        savemat(own_folders / f"{name}_32x32.mat", {"X": images[part].transpose(1, 2, 3, 0), "y": labels})
    dataset = load_dataset("svhn")
    assert raw(dataset)[1] == [0, 1, 9]
    assert raw(dataset, "test")[1] == [5, 0]
    assert np.array_equal(raw(dataset)[0], images[:3].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_cinic10(own_folders: Path, form: str) -> None:
    pytest.importorskip("PIL")
    images = some_images(5, 32, 32, 3)
    places = ["train/airplane/b", "train/airplane/a", "train/truck/c", "valid/bird/v", "test/cat/t"]
    members = {f"{place}.png": png(image) for place, image in zip(places, images, strict=True)}
    if form == "archive":
        write_tar(own_folders / "CINIC-10.tar.gz", {f"./{name}": members[name] for name in members})
    else:
        for name, content in members.items():
            (own_folders / "CINIC-10" / name).parent.mkdir(parents=True, exist_ok=True)
            (own_folders / "CINIC-10" / name).write_bytes(content)
    dataset = load_dataset("cinic10")
    assert raw(dataset)[1] == [0, 0, 9]
    assert np.array_equal(raw(dataset)[0], images[[1, 0, 2]].transpose(0, 3, 1, 2))
    assert raw(dataset, "test")[1] == [3]


def test_images_without_pillow_name_the_extra(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    write_tar(own_folders / "CINIC-10.tar.gz", {"./train/cat/a.png": png(some_images(1, 32, 32, 3)[0])})
    with pytest.raises(FedtailorError, match=r"fedtailor\[images\]"):
        load_dataset("cinic10")


@pytest.mark.parametrize("place", ["femnist/data", "femnist"])
def test_femnist_from_leaf(own_folders: Path, place: str) -> None:
    writers = {f"f{seed:04}": femnist_user(seed, 3 + seed) for seed in range(3)}
    write_leaf(own_folders / place / "train", writers, files=2)
    write_leaf(own_folders / place / "test", {"f0001": femnist_user(8, 2), "new": femnist_user(9, 1)})
    dataset = load_dataset("femnist")
    assert len(dataset.train) == 3 + 4 + 5
    names = dataset.client_names[dataset.client_train]
    for writer in writers:
        chosen = np.flatnonzero(names == writer)
        assert np.array_equal(
            raw(dataset)[0][chosen].reshape(-1, 784), some_images(len(chosen), 784, seed=int(writer[1:]))
        )
    assert dataset.client_names[dataset.client_test].tolist() == ["f0001", "f0001", "new"]
    assert dataset.num_classes == 62


def test_femnist_from_npz(own_folders: Path) -> None:
    np.savez(
        own_folders / "femnist.npz",
        x_train=some_images(4, 28, 28),
        y_train=np.array([0, 61, 5, 5], np.uint8),
        client_train=np.array([0, 0, 1, 1]),
        x_test=some_images(2, 28, 28),
        y_test=np.array([1, 2]),
        client_test=np.array([1, 2]),
        client_names=np.array(["a", "b", "c"]),
    )
    dataset = load_dataset("femnist")
    assert raw(dataset)[0].shape == (4, 1, 28, 28)
    assert dataset.client_names.tolist() == ["a", "b", "c"]


TEXT = "The quick brown fox jumps over the lazy dog; THE END, thrice 123!"


def test_shakespeare_from_lines(own_folders: Path) -> None:
    roles = {"LEAR": TEXT * 4, "FOOL": "short", "KENT": TEXT[::-1] * 3}
    write_lines(
        own_folders / "shakespeare.jsonl", [{"user": user, "text": text} for user, text in roles.items()]
    )
    dataset = load_dataset("shakespeare", window=10, test_share=0.25)
    letters = "".join(dataset.label_names)
    assert len(letters) == dataset.num_classes == 80

    def decoded(indices: torch.Tensor) -> str:
        return "".join(letters[index] for index in indices.tolist())

    x, y = dataset.train.take(torch.arange(len(dataset.train)))
    assert x.shape == (len(dataset.train), 10)
    begin = 0
    for user, text in roles.items():
        kept = text[: len(text) - len(text) // 4]
        count = max(0, len(kept) - 10)
        for row in range(0, count, 7):
            assert decoded(x[begin + row]) == kept[row : row + 10]
            assert letters[y[begin + row]] == kept[row + 10]
        assert (dataset.client_names[dataset.client_train] == user).sum() == count
        begin += count
    assert begin == len(dataset.train)
    x_test, _ = dataset.test.take(torch.tensor([0]))
    assert decoded(x_test[0]) == roles["LEAR"][len(TEXT * 4) - len(TEXT * 4) // 4 :][:10]
    shifted = load_dataset("shakespeare", window=10, shifted=True, stride=5).train.take(torch.tensor([1]))
    assert (decoded(shifted[0][0]), decoded(shifted[1][0])) == (TEXT[5:15], TEXT[6:16])


def test_shakespeare_windows_are_80_by_default(own_folders: Path) -> None:
    write_lines(own_folders / "shakespeare.jsonl", [{"user": "LEAR", "text": TEXT * 10}])
    assert load_dataset("shakespeare").train.take(torch.tensor([0]))[0].shape == (1, 80)
    with pytest.raises(FedtailorError, match="no text of shakespeare is longer"):
        load_dataset("shakespeare", window=10_000)


def test_shakespeare_from_leaf(own_folders: Path) -> None:
    windows = [TEXT[start : start + 20] for start in range(5)]
    users = {"LEAR": (windows, [TEXT[start + 20] for start in range(5)])}
    write_leaf(own_folders / "shakespeare" / "train", users)
    write_leaf(own_folders / "shakespeare" / "test", {"FOOL": (windows[:2], ["é", "b"])})
    dataset = load_dataset("shakespeare", window=20)
    x, y = dataset.train.take(torch.arange(5))
    letters = dataset.label_names
    assert ["".join(letters[index] for index in row) for row in x.tolist()] == windows
    assert [letters[index] for index in y.tolist()] == users["LEAR"][1]
    assert letters[dataset.test.targets[0]] == " "  # a character outside the 80
    with pytest.raises(FedtailorError, match="not 80 characters"):
        load_dataset("shakespeare")


def test_every_set_is_also_read_from_npz(own_folders: Path) -> None:
    parts = {"y_train": np.array([0, 1]), "y_test": np.array([1])}
    for name, shape in (
        ("cifar10", (32, 32, 3)),
        ("cifar100", (3, 32, 32)),
        ("svhn", (32, 32, 3)),
        ("cinic10", (32, 32, 3)),
    ):
        np.savez(
            own_folders / f"{name}.npz",
            x_train=some_images(2, *shape),
            x_test=some_images(1, *shape),
            **parts,
        )
        assert load_dataset(name).train.take(torch.tensor([0]))[0].shape == (1, 3, 32, 32)
