"""A worker whose parent is killed while it starts does not go on to import PyTorch for nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtailor.engines.workers.process import _BOOT
from fedtailor.engines.workers.shared_memory import SharedMemory

SLOW = """
import os, time
with open({place!r}, "w") as file:
    file.write(str(os.getpid()))
os.rename({place!r}, {file!r})
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
boot, path, mailbox = sys.argv[1:]
words = [sys.executable, "-c", boot, path, "0", "0", str(os.getpid()), {by_signal!r}, mailbox]
subprocess.Popen(words, pass_fds=[int(mailbox)]).wait()
"""


@pytest.mark.parametrize("by_signal", ["1", "0"])
def test_a_parent_that_is_killed_takes_along_who_still_imports(by_signal: str, tmp_path: Path) -> None:
    """PyTorch is a stand-in that takes a minute, and says when it is asked for."""
    file, mailbox = tmp_path / "importing", SharedMemory()
    slow = SLOW.format(place=f"{file}.part", file=str(file))
    (tmp_path / "torch.py").write_text(slow, encoding="utf-8")
    words = [_BOOT, json.dumps([str(tmp_path), *sys.path]), str(mailbox.descriptor)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(by_signal=by_signal), *words], pass_fds=[mailbox.descriptor]
    )
    try:
        assert _until(file.exists, 60)
    finally:
        parent.kill()
        parent.wait()
        mailbox.close()
    worker = int(file.read_text(encoding="utf-8"))
    gone = _until(lambda: not _alive(worker), 20)
    if not gone:
        os.kill(worker, signal.SIGKILL)
    assert gone


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def _until(ready, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
