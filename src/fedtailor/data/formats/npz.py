"""One ``.npz`` file with ``x_train y_train x_test y_test`` and optionally who made each example."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedtailor.data.files import broken, memory_of_machine, most_unpacked
from fedtailor.data.partitions import Array
from fedtailor.errors import FedtailorError

NEEDED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("client_train", "client_test", "client_names", "label_names")


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of the file by name; arrays of Python objects are refused, since they could run code."""
    arrays: dict[str, Array] = {}
    name = ""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise broken(path, "holds a single array, expected an .npz archive")
        with archive:
            names = archive.files
            for name in names:
                if name in (*NEEDED, *OPTIONAL):
                    assert archive.zip is not None, "open"
                    _check_size(path, archive.zip, name)
                    arrays[name] = archive[name]
    except FedtailorError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, RuntimeError) as error:
        if "Object arrays" in str(error):
            raise FedtailorError(
                f"{path}: {name} holds Python objects, which are not read, as they could run code: expected one "
                f"array of numbers or names; np.stack({name}) makes one of equal parts, {name}.astype(str) of names"
            ) from error
        raise broken(path, f"cannot be read as .npz ({error})") from error
    except OSError as error:
        raise FedtailorError(f"cannot read {path}: {error}") from error
    lacking = [name for name in NEEDED if name not in arrays]
    if lacking:
        raise FedtailorError(f"{path} holds {', '.join(names)}: expected also {', '.join(lacking)}")
    return arrays


def _check_size(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    """Refuse an array whose header claims more than its part of the archive can hold, before room is made for it."""
    part = archive.getinfo(name if name in archive.namelist() else f"{name}.npy")
    most = most_unpacked(part.compress_size) if part.compress_type else part.compress_size
    with archive.open(part) as stream:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > min(most, part.file_size, memory_of_machine()):
        raise broken(path, f"{name} claims {claimed:,} bytes, more than the file can hold")
