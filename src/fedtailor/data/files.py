"""Where data sets are looked for, and how a file is written whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path

from platformdirs import user_cache_path

from fedtailor.errors import FedtailorError

DATA_VARIABLE = "FEDTAILOR_DATA"
MOST_TIMES = 200  # that data may be larger than its packed file
SYSTEM_FOLDERS = (Path("/usr/share/datasets"),)  # where Debian's dataset-* packages put theirs


def cache_folder() -> Path:
    """The user's cache of data sets, where downloads are put."""
    return user_cache_path("fedtailor") / "datasets"


def search_folders() -> list[Path]:
    """Where data sets are looked for, in order: ``FEDTAILOR_DATA``, the user's cache, system folders."""
    named = os.environ.get(DATA_VARIABLE, "")
    chosen = [Path(part).expanduser() for part in named.split(os.pathsep) if part]
    return [*chosen, cache_folder(), *SYSTEM_FOLDERS]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it appears whole or not at all, also when the machine stops in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def broken(path: Path | str, what: str) -> FedtailorError:
    """The error for a file that is not what it should be."""
    return FedtailorError(
        f"{path}: {what}. The file is truncated or not the right one; delete it or replace it"
    )


def read_file(path: Path) -> bytes:
    """The content of a file, unpacked where it is gzip."""
    try:
        content = path.read_bytes()
        if content[:2] != b"\x1f\x8b":
            return content
        most = most_unpacked(len(content))
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            unpacked = packed.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise broken(path, f"cannot be unpacked ({error})") from error
    except OSError as error:
        raise FedtailorError(f"cannot read {path}: {error.strerror}") from error
    if len(unpacked) > most:
        raise broken(path, f"unpacks to more than {most:,} bytes, far more than such a file holds")
    return unpacked


def most_unpacked(packed: int) -> int:
    """How many bytes of data so many packed bytes may be; data sets shrink to a tenth, bombs to a thousandth.

    >>> most_unpacked(10), most_unpacked(10_000_000)
    (134217728, 2000000000)
    """
    return max(2**27, MOST_TIMES * packed)


def memory_of_machine() -> int:
    """Bytes of this machine's memory; without limit where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**63
