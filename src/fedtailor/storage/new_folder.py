"""A run folder that is being made: it stands beside its place under a hidden name, and appears there complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from fedtailor.errors import FedtailorError, StorageError
from fedtailor.storage.files import (
    LOCK,
    PART,
    disk_errors,
    exists,
    in_use,
    refuse_existing,
    sync_folder,
    write_file,
)
from fedtailor.storage.run_folder import CHECKPOINTS, COVERAGE, METRICS

STRAY_SECONDS = 3600  # younger leftovers may belong to a run that is being made at this moment


def make_aside(path: Path, texts: Mapping[str, str]) -> Path:
    """The hidden folder of a new run with these files; it is not made where a run is already."""
    refuse_existing(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    _make_folder(part, path)
    _remove_strays(path)
    try:
        with disk_errors(path, 0):
            for name, text in {**texts, LOCK: "", METRICS: "", COVERAGE: ""}.items():
                write_file(part / name, [text.encode()])
            (part / CHECKPOINTS).mkdir()
    except FedtailorError:
        remove_aside(part)
        raise
    return part


def put_in_place(part: Path, path: Path) -> None:
    """The rename that makes a run; of two at once, one wins."""
    with disk_errors(path, 0):
        sync_folder(part)
        try:
            os.rename(part, path)
        except OSError as error:
            if path.exists():
                raise exists(path) from error
            raise
        sync_folder(path.parent)
        sync_folder(path.absolute().parent.parent)  # the folder of all runs may be new too


def remove_aside(part: Path) -> None:
    """Give up a folder that has not appeared."""
    shutil.rmtree(part, ignore_errors=True)


def _make_folder(part: Path, path: Path) -> None:
    try:
        with disk_errors(path, 0):
            part.mkdir(parents=True)
    except StorageError as error:
        if isinstance(error.__cause__, NotADirectoryError | FileExistsError | PermissionError):
            raise FedtailorError(str(error)) from error  # a path that cannot hold a folder, not a disk
        raise


def _remove_strays(path: Path) -> None:
    """Folders of runs that were killed while they were made."""
    for stray in path.parent.glob(f".{path.name}.*{PART}"):
        with contextlib.suppress(FileNotFoundError):  # it was put in place just now
            if time.time() - stray.stat().st_mtime > STRAY_SECONDS and not in_use(stray):
                remove_aside(stray)
