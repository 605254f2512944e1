"""Fetch one published file: mirrors, checksum, retry, resume; its name appears only when it is whole."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fedtailor.errors import FedtailorError

OFFLINE_VARIABLE = "FEDTAILOR_OFFLINE"
MIRROR_VARIABLE = "FEDTAILOR_MIRROR"
ATTEMPTS = 3  # times that the list of mirrors is gone through
TIMEOUT_SECONDS = 30.0  # without a byte from the other side
CHUNK_BYTES = 1 << 18

NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
)

Progress = Callable[[int, int], None]
"""Called with the bytes that are here and the bytes of the whole file."""


@dataclass(frozen=True)
class RemoteFile:
    """A published file: where it goes in the cache, where it can be had, and what it must be."""

    path: str  # relative to the cache folder
    mirrors: tuple[str, ...]  # full addresses, tried in order
    checksum: str  # "sha256:..." or "md5:...", as published
    size: int  # bytes


class _FailedError(Exception):
    """One try at one mirror did not bring the file; the message says why."""


def offline() -> bool:
    """Whether the user forbade downloads."""
    return os.environ.get(OFFLINE_VARIABLE, "") not in {"", "0"}


def addresses(file: RemoteFile) -> list[str]:
    """Where to try: the user's own mirror first, if there is one, then the published ones."""
    own = os.environ.get(MIRROR_VARIABLE, "").rstrip("/")
    return [*([f"{own}/{file.path}"] if own else []), *file.mirrors]


def download(
    file: RemoteFile,
    folder: Path,
    *,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Bring ``file`` into ``folder`` and return its path.

    Bytes are collected in ``<name>.part`` and the file gets its name only once its checksum is right. After
    a cut, the next try (here, or in a later run) goes on where the last one ended. A file with a wrong
    checksum is deleted and the next mirror tried; two processes that want the same file do not disturb each
    other.
    """
    target = folder / file.path
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _private(part) as mine:
            _fetch(file, mine, progress or (lambda _have, _total: None), sleep)
            mine.replace(target)
    except OSError as error:
        raise FedtailorError(
            f"cannot write {target} ({error.strerror or error}): expected a folder that can be written to; "
            f"set FEDTAILOR_DATA to a folder that holds the files, or XDG_CACHE_HOME to a place for the cache"
        ) from error
    return target


@contextlib.contextmanager
def _private(part: Path) -> Iterator[Path]:
    """The part file to write to; a name of its own where another process is at work on the usual one."""
    with part.open("ab") as held:
        if _lock(held):
            try:
                yield part
            finally:
                if part.exists() and part.stat().st_size == 0:
                    part.unlink()
            return
    own = part.with_name(f"{part.name}.{os.getpid()}")
    try:
        yield own
    finally:
        own.unlink(missing_ok=True)


def _lock(file: BinaryIO) -> bool:
    """Try to take the file for this process until it is closed; true where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fetch(file: RemoteFile, part: Path, progress: Progress, sleep: Callable[[float], None]) -> None:
    reasons: list[str] = []
    for attempt in range(ATTEMPTS):
        if attempt:
            sleep(2.0 ** (attempt - 1))
        for address in addresses(file):
            try:
                _from_mirror(address, file, part, progress)
            except _FailedError as failure:
                reasons.append(f"{address}: {failure}")
            else:
                return
    kept = part.exists() and part.stat().st_size > 0
    hope = ". What arrived is kept; the next try goes on from there" if kept else ""
    raise FedtailorError(f"could not download {file.path}: {'; '.join(dict.fromkeys(reasons))}{hope}")


def _from_mirror(address: str, file: RemoteFile, part: Path, progress: Progress) -> None:
    """The whole file from one mirror, going on from an earlier try; from the start if that does not fit."""
    resumed = part.exists() and part.stat().st_size > 0
    for _ in range(2 if resumed else 1):
        _receive(address, file, part, progress)
        found = _checksum(file, part)
        if found == file.checksum:
            return
        part.unlink()
    raise _FailedError(f"has the wrong content ({found[:20]}..., expected {file.checksum[:20]}...)")


def _checksum(file: RemoteFile, part: Path) -> str:
    algorithm = file.checksum.partition(":")[0]
    with part.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _receive(address: str, file: RemoteFile, part: Path, progress: Progress) -> None:
    """Append what is missing of the file, from one mirror; never more bytes than the file has."""
    if urllib.parse.urlsplit(address).scheme not in {"http", "https"}:
        raise _FailedError("expected an http or https address")
    have = part.stat().st_size if part.exists() else 0
    if have >= file.size:
        return
    request = urllib.request.Request(address, headers={"User-Agent": "fedtailor"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
            have = have if resumed else 0
            _check_answer(response, have, resumed, file)
            with part.open("ab" if resumed else "wb") as output:
                while chunk := response.read(CHUNK_BYTES):
                    have += len(chunk)
                    if have > file.size:
                        break
                    output.write(chunk)
                    progress(have, file.size)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)  # this mirror's file is shorter than what is here: begin again
        raise _FailedError(f"answered {error.code} {error.reason}") from error
    except NETWORK_ERRORS as error:
        raise _FailedError(str(getattr(error, "reason", None) or error or type(error).__name__)) from error
    if have > file.size:
        part.unlink(missing_ok=True)
        raise _FailedError(f"sends more than the {file.size} bytes of the file")
    if have < file.size:
        raise _FailedError(f"ended after {have} of {file.size} bytes")


def _check_answer(response: http.client.HTTPResponse, have: int, resumed: bool, file: RemoteFile) -> None:
    """Refuse an answer that cannot be the (rest of the) file before any of it is written."""
    if resumed and not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
        raise _FailedError("answered with another range than asked for")
    announced = response.headers.get("Content-Length")
    if announced is not None and int(announced) != file.size - have:
        raise _FailedError(f"offers {have + int(announced)} bytes, expected {file.size}: not the right file")
