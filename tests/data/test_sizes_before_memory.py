"""Files that claim more than they hold, and sizes that no machine has: one sentence each, and no memory is taken."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

import fedtailor
from commands import SMALL, call
from fedtailor.config import load_config, make_config
from fedtailor.data.batches import Examples
from fedtailor.data.files import read_file
from fedtailor.data.formats.archive import walk
from fedtailor.data.formats.images import decode
from fedtailor.data.formats.npz import read_npz
from fedtailor.errors import FedtailorError
from fedtailor.models.registry import build_model
from fedtailor.storage.files import append_file, refuse_existing
from helpers import tiny_mlp, vectors

MOST = 300 * 2**20  # bytes that refusing may take


@pytest.fixture(autouse=True)
def _little_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST


def npy(shape: tuple[int, ...], held: bytes = b"") -> bytes:
    """An array that claims a shape, and holds what is given."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + held


@pytest.mark.parametrize("shape", [(2**44,), (10**6, 2**24), (2**60, 2**60)])
@pytest.mark.parametrize("packed", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_claims_terabytes_is_refused(shape, packed, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w", packed) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", npy(shape, b"\0" * 100))
    with pytest.raises(FedtailorError, match="x_train claims .* bytes, more than the file can hold"):
        read_npz(tmp_path / "x.npz")


@pytest.mark.slow
def test_a_gzip_bomb_is_refused(tmp_path):
    packer, parts = zlib.compressobj(9, zlib.DEFLATED, 31), list[bytes]()
    for _ in range(300):
        parts.append(packer.compress(bytes(2**20)))
    (tmp_path / "bomb.gz").write_bytes(b"".join([*parts, packer.flush()]))
    with pytest.raises(FedtailorError, match="unpacks to more than .* bytes"):
        read_file(tmp_path / "bomb.gz")
    (tmp_path / "fine.gz").write_bytes(gzip.compress(b"fine" * 1000))
    assert read_file(tmp_path / "fine.gz") == b"fine" * 1000


def test_a_tar_that_claims_terabytes_is_refused(tmp_path):
    info = tarfile.TarInfo("a.png")
    info.size = 2**46
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(FedtailorError, match=r"claims more than 134,217,728 bytes"):
        list(walk(tmp_path / "x.tar", lambda _: True))


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_an_image_of_too_many_pixels_is_refused(side):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    with pytest.raises(FedtailorError, match=r"pixels: expected at most 64,000,000"):
        decode(png, "x.png", "RGB", None)


def test_labels_of_a_thousand_million_are_refused():
    x, y = vectors(20).columns
    y = y.clone()
    y[3] = 10**9
    with pytest.raises(FedtailorError, match="1000000001: expected at most 1,000,000"):
        fedtailor.FederatedData.from_examples(Examples.of(x, y), vectors(4), parts=[list(range(20))])


@pytest.mark.parametrize("channels", [[4_000_000_000], [2**24, 2**24]])
def test_networks_that_fit_no_memory_are_refused(channels):
    with pytest.raises(FedtailorError, match="at most 16,777,216|do not fit this machine's memory"):
        build_model("cnn", input_shape=(1, 8, 8), num_classes=10, channels=channels)


DEEP = ["x = " + "[" * 100_000, "[" + ".".join("a" * 5_000) + "]\n", "a = " + "{b=" * 50_000]


@pytest.mark.parametrize("text", DEEP, ids=["lists", "sections", "tables"])
def test_configs_nested_without_end_are_refused(text, tmp_path):
    (tmp_path / "deep.toml").write_text(text, encoding="utf-8")
    with pytest.raises(FedtailorError):
        load_config(tmp_path / "deep.toml")
    table: dict = {}
    inner = table
    for _ in range(900):
        inner["data"] = {}
        inner = inner["data"]
    with pytest.raises(FedtailorError, match="nested far too deep"):
        make_config(table)


def test_a_name_of_five_thousand_letters_is_one_sentence(tmp_path, monkeypatch, capfd):
    (tmp_path / "long.toml").write_text(SMALL.format(name="x" * 5000, rounds=1), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", "long.toml") == 2
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(FedtailorError, match="name too long"):
        refuse_existing(tmp_path / ("x" * 5000))
    with pytest.raises(FedtailorError, match="name too long"):
        fedtailor.train(tiny_mlp(), vectors(20), "equal", "fedavg", folder=tmp_path / ("x" * 5000))


def test_nothing_is_appended_through_a_link(tmp_path):
    (tmp_path / "secret").write_text("mine", encoding="utf-8")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(FedtailorError, match="cannot be written"):
        append_file(tmp_path / "events.jsonl", b"more")
    assert (tmp_path / "secret").read_text(encoding="utf-8") == "mine"
