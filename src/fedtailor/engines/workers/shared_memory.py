"""Memory that several processes see. It has no name: the system frees it with the last process that has it open."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence

from fedtailor.errors import StorageError

Buffer = bytes | bytearray | memoryview

LINE = 64  # bytes of a cache line: where pieces start


def aligned(position: int) -> int:
    """The next position at which a piece may start.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-position // LINE) * LINE


class SharedMemory:
    """Bytes behind a descriptor that a child process may inherit; either side may make them longer."""

    def __init__(self, size: int = mmap.PAGESIZE, descriptor: int | None = None) -> None:
        self.descriptor = _nameless_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        if descriptor is None:
            self._reserve(size)
        self.view(1)

    def view(self, size: int) -> memoryview:
        """The first ``size`` bytes (or more); longer than before if the other side has made them so."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, 0)  # the old mapping goes with the last view of it
        return memoryview(self._map)

    def write(self, start: int, pieces: Sequence[Buffer]) -> int:
        """Put pieces one behind the other; returns where they end."""
        end = start + sum(memoryview(piece).nbytes for piece in pieces)
        if os.fstat(self.descriptor).st_size < end:
            self._reserve(end)
        with self.view(end) as view:
            for piece in pieces:
                size = memoryview(piece).nbytes
                view[start : start + size] = memoryview(piece).cast("B")
                start += size
        return end

    def private(self) -> mmap.mmap:
        """All bytes as a mapping of the caller's own: what it changes there, nobody else sees."""
        return mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY)

    def close(self) -> None:
        """Give it back."""
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _reserve(self, size: int) -> None:
        """Make the file longer and its memory real: a process that writes where there is none is killed.

        In whole pages, which it takes anyway: an answer that is a digit longer than the last asks for nothing.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            os.ftruncate(self.descriptor, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise StorageError(
                f"{size:,} bytes of shared memory for the workers: {error.strerror}; "
                "set engine.workers = 0 to run all clients in one process"
            ) from error


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedtailor")
    with tempfile.TemporaryFile() as file:  # already without a name
        return os.dup(file.fileno())
