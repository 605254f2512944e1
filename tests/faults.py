"""Crashes, full disks and power cuts, one system call at a time."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Everything through which fedtailor.storage.files and .generations change a disk.
CHANGES = ("open", "write", "fsync", "ftruncate", "replace", "rename", "unlink", "mkdir")


@dataclass
class Watch:
    """Counts the changing calls and lets ``before`` do something ahead of one of them."""

    before: Callable[[int, str, tuple[Any, ...]], None]
    names: tuple[str, ...] = CHANGES
    count: int = 0
    real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        changes = name != "open" or bool(arguments[1] & (os.O_WRONLY | os.O_RDWR))
        if changes:
            self.count += 1
            self.before(self.count, name, arguments)
        return self.real[name](*arguments, **options)


@contextmanager
def watched(
    before: Callable[[int, str, tuple[Any, ...]], None], names: tuple[str, ...] = CHANGES
) -> Iterator[Watch]:
    """Put the watch between fedtailor and the system."""
    watch = Watch(before, names)
    for name in names:
        watch.real[name] = getattr(os, name)
        setattr(os, name, lambda *a, _name=name, **o: watch.call(_name, *a, **o))
    try:
        yield watch
    finally:
        for name, function in watch.real.items():
            setattr(os, name, function)


def count_changes(work: Callable[[], object], names: tuple[str, ...] = CHANGES) -> int:
    """How many calls a piece of work makes."""
    with watched(lambda *_: None, names) as watch:
        work()
    return watch.count


def killed_at(number: int, work: Callable[[], object], *, half: bool = False) -> bool:
    """Do the work in a child that is killed right before its ``number``-th change; whether it came so far.

    ``half``: if that change is a write, the first half of it is done.
    """

    def before(count: int, name: str, arguments: tuple[Any, ...]) -> None:
        if count == number:
            if half and name == "write":
                data = memoryview(arguments[1]).cast("B")
                watch.real["write"](arguments[0], data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with watched(before) as watch:
                work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@contextmanager
def failing_at(number: int, names: tuple[str, ...], code: int) -> Iterator[None]:
    """The ``number``-th of these calls fails, as on a full or broken disk; later ones work."""

    def before(count: int, name: str, arguments: tuple[Any, ...]) -> None:
        if count == number:
            raise OSError(code, os.strerror(code))

    with watched(before, names):
        yield


FULL = errno.ENOSPC
BROKEN = errno.EIO


# Power cuts: what a disk may hold if only what was synced is sure to be there


@dataclass
class Disk:
    """The files of one folder tree as a log of changes, to be replayed up to any moment."""

    root: Path
    log: list[tuple[Any, ...]] = field(default_factory=list)
    descriptors: dict[int, Path] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note every change that is made below the root."""

        def before(_count: int, name: str, arguments: tuple[Any, ...]) -> None:
            if name == "write":
                position = os.lseek(arguments[0], 0, os.SEEK_CUR)
                path = self.descriptors[arguments[0]]
                append = path.name.endswith(".jsonl")
                start = path.stat().st_size if append else position
                self.log.append(("write", path, start, bytes(memoryview(arguments[1]).cast("B"))))
            elif name == "ftruncate":
                self.log.append(("truncate", self.descriptors[arguments[0]], arguments[1]))
            elif name == "fsync":
                self.log.append(("sync", self.descriptors[arguments[0]]))
            elif name in ("replace", "rename"):
                self.log.append(("rename", Path(arguments[0]), Path(arguments[1])))
            elif name == "unlink":
                self.log.append(("remove", Path(arguments[0])))

        with watched(before, ("write", "fsync", "ftruncate", "replace", "rename", "unlink")):
            real = os.open

            def opened(path: Any, *arguments: Any) -> int:
                if arguments[0] & os.O_CREAT and not Path(path).exists():
                    self.log.append(("create", Path(path)))
                descriptor = real(path, *arguments)
                self.descriptors[descriptor] = Path(path)
                return descriptor

            os.open = opened  # type: ignore[assignment]
            try:
                yield
            finally:
                os.open = real

    def states(self, start: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """For every moment, the worst that a power cut may leave; ``start`` is the tree before the changes."""
        for moment in range(len(self.log) + 1):
            for names_are_lost in (True, False):
                for loss in ("nothing", "contents", "half"):
                    label = f"moment {moment}, names {'lost' if names_are_lost else 'kept'}, lost {loss}"
                    yield (
                        label,
                        lambda target, m=moment, n=names_are_lost, c=loss: self._build(
                            start, target, m, n, c
                        ),
                    )

    def _build(self, start: Path, target: Path, moment: int, names_are_lost: bool, loss: str) -> None:
        """Replay the log; contents and names that were not synced are as they are, as before, or in between."""
        files = [path for path in start.rglob("*") if path.is_file()]
        contents = {number: bytearray(path.read_bytes()) for number, path in enumerate(files)}
        names = {self.root / path.relative_to(start): number for number, path in enumerate(files)}
        durable, durable_names = {key: bytes(value) for key, value in contents.items()}, dict(names)
        for change in self.log[:moment]:
            kind, path = change[0], change[1]
            if kind == "create":
                names[path] = len(contents)
                contents[len(contents)] = bytearray()
            elif kind == "write":
                data = contents[names[path]]
                data[change[2] : change[2] + len(change[3])] = change[3]
            elif kind == "truncate":
                del contents[names[path]][change[2] :]
            elif kind == "rename":
                names[change[2]] = names.pop(path)
            elif kind == "remove":
                names.pop(path, None)
            elif path in names:
                durable[names[path]] = bytes(contents[names[path]])
                # A new file that was synced has its name: file systems commit both together. Renames may be lost.
                durable_names.setdefault(path, names[path])
            else:
                durable_names = dict(names)
        kept_names = durable_names if names_are_lost else names
        shutil.copytree(
            start, target, ignore=lambda _folder, entries: [e for e in entries if Path(_folder, e).is_file()]
        )
        for path, number in kept_names.items():
            now, before = bytes(contents[number]), durable.get(number, b"")
            if loss == "half":  # the first half of an overwritten file arrived, and zeros where it grew
                middle = len(before) // 2 if now[: len(before)] != before else len(before)
                before = now[:middle] + before[middle:] + bytes(max(0, len(now) - len(before)))
            (target / path.relative_to(self.root)).write_bytes(now if loss == "nothing" else before)
