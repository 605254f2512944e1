"""Files that are cut or wrong, in every format: one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from published_files import (
    cifar_records,
    femnist_user,
    python2_pickle,
    some_images,
    write_idx,
    write_leaf,
    write_mnist,
    write_tar,
)
from scipy.io import savemat

from fedtailor.data import load_dataset
from fedtailor.errors import FedtailorError


def truncate(path: Path, kept: float = 0.6) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])


def test_cut_and_wrong_idx_files(own_folders: Path) -> None:
    folder = own_folders / "mnist"
    write_mnist(folder)
    truncate(folder / "train-images-idx3-ubyte.gz")
    with pytest.raises(FedtailorError, match=r"train-images-idx3-ubyte.gz.*truncated or not the right one"):
        load_dataset("mnist")
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(FedtailorError, match="does not begin as an idx file"):
        load_dataset("mnist")
    write_idx(folder / "train-images-idx3-ubyte.gz", some_images(19, 28, 28))
    with pytest.raises(FedtailorError, match="19 images and 20 labels"):
        load_dataset("mnist")
    write_idx(folder / "train-images-idx3-ubyte.gz", some_images(20, 30, 30))
    with pytest.raises(FedtailorError, match=r"\(30, 30\)"):
        load_dataset("mnist")
    write_mnist(folder)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.array([*range(19), 200], np.uint8))
    with pytest.raises(FedtailorError, match=r"label 200 of example 19 in mnist \(train\): expected 0 to 9"):
        load_dataset("mnist")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    write_mnist(folder, ending="")
    truncate(folder / "t10k-labels-idx1-ubyte")
    with pytest.raises(FedtailorError, match="expected 18 for shape"):
        load_dataset("mnist")


def test_cut_and_wrong_cifar_files(own_folders: Path) -> None:
    folder = own_folders / "cifar-10-batches-bin"
    folder.mkdir()
    with pytest.raises(FedtailorError, match=r"lacks data_batch_1.bin"):
        load_dataset("cifar10")
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        (folder / name).write_bytes(cifar_records(some_images(2, 3, 32, 32), np.array([1, 2])))
    truncate(folder / "data_batch_3.bin")
    with pytest.raises(FedtailorError, match=r"data_batch_3.bin: has .* expected a multiple of 3073"):
        load_dataset("cifar10")


def test_cut_and_wrong_python_files(own_folders: Path) -> None:
    folder = own_folders / "cifar-100-python"
    folder.mkdir()
    images = some_images(2, 3072)
    (folder / "test").write_bytes(python2_pickle({"data": images, "fine_labels": [1, 2]}))
    for content, words in (
        (python2_pickle({"data": images, "fine_labels": [1, 2]})[:3000], "train: ends early"),
        (python2_pickle({"data": images[:, :10], "fine_labels": [1, 2]}), "no 'data' of 3072 pixels"),
        (python2_pickle({"data": images, "labels": [1, 2]}), "no list 'fine_labels'"),
        (python2_pickle({"data": images, "fine_labels": [1]}), "2 images and 1 labels"),
        (python2_pickle({"data": images, "fine_labels": [1, 100]}), "label 100 of example 1"),
        (b"cos\nsystem\n(S'true'\ntR.", "names 'os system'"),
    ):
        (folder / "train").write_bytes(content)
        with pytest.raises(FedtailorError, match=words):
            load_dataset("cifar100")


def test_an_unreadable_file(own_folders: Path) -> None:
    write_mnist(own_folders / "mnist")
    (own_folders / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    (own_folders / "mnist" / "t10k-labels-idx1-ubyte.gz").mkdir()
    with pytest.raises(FedtailorError, match=r"cannot read .*t10k-labels"):
        load_dataset("mnist")


def test_cut_archives(own_folders: Path) -> None:
    path = own_folders / "cifar-10-binary.tar.gz"
    content = cifar_records(some_images(4, 3, 32, 32), np.arange(4))
    write_tar(path, {"cifar-10-batches-bin/test_batch.bin": content})
    with pytest.raises(FedtailorError, match=r"lacks data_batch_1.bin"):
        load_dataset("cifar10")
    truncate(path)
    with pytest.raises(FedtailorError, match="cannot be unpacked"):
        load_dataset("cifar10")


def test_cut_and_wrong_mat_files(own_folders: Path) -> None:
    for name in ("train", "test"):
        savemat(
            own_folders / f"{name}_32x32.mat", {"X": some_images(32, 32, 3, 2), "y": np.array([[1], [2]])}
        )
    truncate(own_folders / "train_32x32.mat", 0.5)
    with pytest.raises(FedtailorError, match="cannot be read as a MATLAB file"):
        load_dataset("svhn")
    savemat(own_folders / "train_32x32.mat", {"Z": np.zeros(3)})
    with pytest.raises(FedtailorError, match="holds no images X"):
        load_dataset("svhn")
    (own_folders / "train_32x32.mat").write_bytes(b"")
    with pytest.raises(FedtailorError, match="MATLAB"):
        load_dataset("svhn")


def test_cut_and_wrong_leaf_files(own_folders: Path) -> None:
    write_leaf(own_folders / "femnist/train", {"a": femnist_user(0, 2)})
    write_leaf(own_folders / "femnist/test", {"a": femnist_user(1, 1)})
    file = own_folders / "femnist/train/all_data_0.json"
    whole = file.read_text()
    truncate(file)
    with pytest.raises(FedtailorError, match=r"all_data_0.json: is not JSON"):
        load_dataset("femnist")
    file.write_text("[]")
    with pytest.raises(FedtailorError, match="has no user_data"):
        load_dataset("femnist")
    changed = json.loads(whole)
    changed["user_data"]["a"]["y"].pop()
    file.write_text(json.dumps(changed))
    with pytest.raises(FedtailorError, match="equal length for user a"):
        load_dataset("femnist")
    changed["user_data"]["a"] = {"x": [[0.5] * 783], "y": [1]}
    file.write_text(json.dumps(changed))
    with pytest.raises(FedtailorError, match="not 784 numbers"):
        load_dataset("femnist")
    changed["user_data"]["a"] = {"x": [[1.5] * 784], "y": [1]}
    file.write_text(json.dumps(changed))
    with pytest.raises(FedtailorError, match="floats from 0 to 1"):
        load_dataset("femnist")
    file.unlink()
    with pytest.raises(FedtailorError, match=r"holds no .json files"):
        load_dataset("femnist")


def test_cut_and_wrong_npz_files(own_folders: Path) -> None:
    path = own_folders / "mnist.npz"
    arrays = {f"x_{part}": some_images(2, 28, 28) for part in ("train", "test")}
    np.savez(path, **arrays, y_train=np.zeros(2, int))
    with pytest.raises(FedtailorError, match="expected also y_test"):
        load_dataset("mnist")
    np.savez(path, **arrays, y_train=np.zeros(2), y_test=np.zeros(2, int))
    with pytest.raises(FedtailorError, match="whole numbers"):
        load_dataset("mnist")
    np.savez(path, **arrays, y_train=np.array([0, {}], dtype=object), y_test=np.zeros(2, int))
    with pytest.raises(FedtailorError, match="y_train holds Python objects, which are not read.*np.stack"):
        load_dataset("mnist")
    truncate(path)
    with pytest.raises(FedtailorError, match=r"cannot be read as .npz"):
        load_dataset("mnist")
    np.save(own_folders / "single.npy", np.zeros(2))
    path.write_bytes((own_folders / "single.npy").read_bytes())
    with pytest.raises(FedtailorError, match="single array"):
        load_dataset("mnist")
