"""An open run folder: rounds go in one by one, and none that went in is ever lost."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fedtailor.errors import CorruptError, FedtailorError, LockedError, StorageError, require
from fedtailor.round import ServerState
from fedtailor.server import generations
from fedtailor.server.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from fedtailor.server.fingerprint import Fingerprint, differences, refuse_drift
from fedtailor.server.generations import Generation
from fedtailor.server.run_folder import CHECKPOINTS, EVENTS, METRICS, Row, RunFolder
from fedtailor.server.storage import (
    LOCK,
    PART,
    Lock,
    append_file,
    disk_errors,
    in_use,
    sync_folder,
    truncate_file,
    write_file,
)


@dataclass(frozen=True)
class CheckpointSettings:
    """How often a run is saved. It changes no result."""

    every: int = 1
    """Rounds between saved generations; a better evaluation, the last round and Ctrl-C are always saved."""
    keep: int = 2
    """How many of the last generations stay, besides the best one; the second is there if the first is damaged."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
