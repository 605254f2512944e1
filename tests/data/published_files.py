"""Write small files exactly as the data sets are published, without the code under test."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def some_images(count: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_idx(path: Path, array: Array) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, train: int = 20, test: int = 10, ending: str = ".gz") -> dict[str, Array]:
    arrays = {
        "train-images-idx3-ubyte": some_images(train, 28, 28),
        "train-labels-idx1-ubyte": np.arange(train, dtype=np.uint8) % 10,
        "t10k-images-idx3-ubyte": some_images(test, 28, 28, seed=1),
        "t10k-labels-idx1-ubyte": np.arange(test, dtype=np.uint8) % 10,
    }
    for name, array in arrays.items():
        write_idx(folder / (name + ending), array)
    return arrays


def cifar_records(images: Array, *labels: Array) -> bytes:
    columns = [np.asarray(label, np.uint8)[:, None] for label in labels]
    return np.concatenate([*columns, images.reshape(len(images), -1)], 1).tobytes()


def python2_pickle(entries: dict[str, Any]) -> bytes:
    """A dict as Python 2's cPickle wrote it with protocol 2: strings are bytes, arrays name numpy.core."""

    def value(item: Any) -> bytes:
        if isinstance(item, str):
            return b"U" + bytes([len(item)]) + item.encode() + b"q\x07"
        if isinstance(item, list):
            return b"]q\x08(" + b"".join(map(value, item)) + b"e"
        if isinstance(item, int):
            return b"K" + bytes([item]) if item < 256 else b"J" + struct.pack("<i", item)
        raw = item.tobytes()
        return (
            b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
            b"(K\x01" + b"".join(b"J" + struct.pack("<i", size) for size in item.shape) + b"\x86"
            b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
        )

    body = b"".join(value(key) + value(item) for key, item in entries.items())
    return b"\x80\x02}q\x00(" + body + b"u."


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def png(pixels: Array) -> bytes:
    """A colour image (H, W, 3) as PNG, without Pillow."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def write_leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]], files: int = 1) -> None:
    folder.mkdir(parents=True)
    names = list(users)
    for number in range(files):
        chosen = names[number::files]
        content = {
            "users": chosen,
            "num_samples": [len(users[user][1]) for user in chosen],
            "user_data": {user: {"x": users[user][0], "y": users[user][1]} for user in chosen},
        }
        (folder / f"all_data_{number}.json").write_text(json.dumps(content))


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def femnist_user(seed: int, count: int) -> tuple[list[list[float]], list[int]]:
    pixels = some_images(count, 784, seed=seed)
    return (pixels / 255).tolist(), [(seed * 7 + i) % 62 for i in range(count)]
