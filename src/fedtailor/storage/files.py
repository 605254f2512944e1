"""Files that survive a crash: written, synced, renamed, synced; and a lock that dies with its owner.

Imports no PyTorch, so that a command can refuse a folder that is in use before anything slow is loaded.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedtailor.errors import FedtailorError, LockedError, StorageError

try:
    import fcntl
except ImportError:  # Windows: see Lock and _sync for what that means
    fcntl = None  # type: ignore[assignment]

Buffer = bytes | bytearray | memoryview

PART = ".part"  # ends the name of everything that is not complete yet
LOCK = "run.lock"
CLIENTS = "clients.json"  # in the folder of a run on Flower, and in no other
DEVICES = "devices.json"  # the same: who is there, what went to and fro, for people who watch

PRIVATE = 0o600  # files of a run are their owner's alone: they may tell of clients' data
_NO_LINK = getattr(
    os, "O_NOFOLLOW", 0
)  # a link in a run folder leads elsewhere: nothing is written through it
_UNLOCKABLE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # a file system without locks


def replace_file(
    path: Path, chunks: Sequence[Buffer], *, seal: Callable[[], bytes] = bytes, part: Path | None = None
) -> None:
    """Put a file in place, all of it or none of it, also if the power goes.

    ``seal`` gives the file's last bytes; it is asked for them once everything else is on its way to the disk.
    The bytes are first written to ``part``; if that exists, its room on the disk is used again.
    """
    part = part or path.with_name(path.name + PART)
    needed = sum(memoryview(chunk).nbytes for chunk in chunks)
    with disk_errors(path, needed):
        try:
            write_file(part, chunks, seal)
            os.replace(part, path)
        except OSError:
            remove_file(part)
            raise
        sync_folder(path.parent)


def write_file(path: Path, chunks: Sequence[Buffer], seal: Callable[[], bytes] = bytes) -> None:
    """Write a file and sync it; a sync that fails is never tried again, because its data may be gone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _NO_LINK, PRIVATE)
    try:
        length = 0
        for chunk in chunks:
            length += _write(descriptor, chunk)
        if seal is not bytes:
            _sync(descriptor)
        length += _write(descriptor, seal())
        if os.fstat(descriptor).st_size != length:  # there was a longer file in this place
            os.ftruncate(descriptor, length)
        _sync(descriptor)
    finally:
        os.close(descriptor)


def append_file(path: Path, data: bytes) -> None:
    """Add to the end of a file; ``sync_file`` makes it durable."""
    with disk_errors(path, len(data)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, PRIVATE)
        try:
            _write(descriptor, data)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make all that was written to a file durable."""
    with disk_errors(path, 0):
        descriptor = os.open(path, os.O_WRONLY | _NO_LINK)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)


def truncate_file(path: Path, length: int) -> None:
    """Cut a file after ``length`` bytes."""
    with disk_errors(path, 0):
        descriptor = os.open(path, os.O_WRONLY | _NO_LINK)
        try:
            os.ftruncate(descriptor, length)
            _sync(descriptor)
        finally:
            os.close(descriptor)


def remove_file(path: Path) -> None:
    """Remove a file if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Windows cannot open folders: there the file system's journal has to do."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: Buffer) -> int:
    rest = memoryview(data).cast("B")
    length = len(rest)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]
    return length


def _sync(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:  # macOS: a plain fsync stops at the drive's own cache
        fcntl.fcntl(descriptor, full)
    else:
        os.fsync(descriptor)


@contextmanager
def disk_errors(path: Path, needed: int) -> Iterator[None]:
    """Turn what the system says about a disk into one sentence with the path and the bytes that were needed."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = next(parent for parent in path.absolute().parents if parent.is_dir())
            reason += f" ({needed:,} bytes to write, {shutil.disk_usage(folder).free:,} free)"
        raise StorageError(f"{path} cannot be written: {reason}") from error


class Lock:
    """The right to write into a run folder. It is the system's: whoever is killed loses it at that moment.

    Where there is no ``flock`` (Windows, some network file systems) nothing is locked and ``held`` is false;
    the caller says so.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        try:
            # Without O_CREAT and O_TRUNC: a second run must not change a byte.
            self._descriptor = os.open(self.path, os.O_RDWR | _NO_LINK)
        except FileNotFoundError:
            raise FedtailorError(f"{folder}: no {LOCK} there; expected the folder of a run") from None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened: {error.strerror or error}") from error
        self.held = self._take(folder)

    def _take(self, folder: Path, patience: int = 2) -> bool:
        if fcntl is None:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if patience:  # someone may only be looking whether the folder is in use
                time.sleep(0.05)
                return self._take(folder, patience - 1)
            owner = os.read(self._descriptor, 200).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise LockedError(
                f"{folder} is in use{f' by {owner}' if owner else ''}: nothing was changed"
            ) from None
        except OSError as error:
            if error.errno in _UNLOCKABLE:
                return False
            os.close(self._descriptor)
            raise StorageError(f"{self.path} cannot be locked: {error.strerror or error}") from error
        return True

    def sign(self, owner: str) -> None:
        """Write who holds the lock, for the message that others get."""
        with disk_errors(self.path, len(owner)):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            _write(self._descriptor, owner.encode("ascii", "replace") + b"\n")

    def release(self) -> None:
        """Let others write."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def in_use(folder: Path) -> bool:
    """Whether a run writes into this folder right now."""
    if fcntl is None or not (folder / LOCK).is_file():
        return False
    try:
        Lock(folder).release()
    except LockedError:
        return True
    return False


def refuse_existing(path: Path) -> None:
    """Refuse to start a run where there is one; cheap enough to ask before anything is loaded."""
    try:
        busy, there = in_use(path), path.exists()
    except OSError as error:  # a name that no file system has
        raise FedtailorError(f"run folder {str(path)[:200]}: {error.strerror or error}") from error
    if busy:
        raise LockedError(f"run folder {path} is in use by another run: nothing was changed")
    if there:
        raise exists(path)


def exists(path: Path) -> FedtailorError:
    """The error for a new run in the place of another, or of something else."""
    if not (path / LOCK).is_file():
        return FedtailorError(
            f"{path} is there already and is no run: choose another name for the run's folder (--set name=...; "
            "folder=... in Python)"
        )
    return FedtailorError(
        f"run folder {path} exists already: `fedtailor resume {path}` goes on with it (resume=True in Python); "
        "for a new run choose another name (--set name=...; folder=... in Python) or remove it"
    )
