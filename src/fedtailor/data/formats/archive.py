"""Read members of folders and tar archives alike; nothing is unpacked to disk, so none can escape."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from fedtailor.data.files import broken, most_unpacked, read_file


def read_members(path: Path, names: list[str]) -> dict[str, bytes]:
    """The contents of the named files in the folder ``path``, or anywhere in the archive ``path``."""
    if path.is_dir():
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise broken(path, f"lacks {', '.join(absent)}")
        return {name: read_file(path / name) for name in names}
    found = {_last(name): content for name, content in walk(path, lambda name: _last(name) in names)}
    absent = [name for name in names if name not in found]
    if absent:
        raise broken(path, f"lacks {', '.join(absent)}")
    return found


def walk(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name (relative, with forward slashes) and content of the wanted files in a folder or archive."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted(name) and file.is_file():
                yield name, file.read_bytes()
        return
    try:
        room = most_unpacked(path.stat().st_size)
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = str(PurePosixPath(member.name))
                if member.isfile() and wanted(name):
                    room -= member.size
                    if room < 0:
                        raise broken(path, f"claims more than {most_unpacked(path.stat().st_size):,} bytes")
                stream = archive.extractfile(member) if member.isfile() and wanted(name) else None
                if stream is not None:
                    yield name, stream.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise broken(path, f"cannot be unpacked ({error})") from error


def _last(name: str) -> str:
    return name.rpartition("/")[2]
