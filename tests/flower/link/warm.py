"""Flower's processes started from one that has imported everything, so that a test can send many messages.

Flower starts a process for every message, and nine tenths of the time that it takes is Python importing PyTorch. Here
``flwr-clientapp`` and ``flwr-serverapp`` are stand-ins which ask a parent that lives beside the SuperLink or SuperNode
to fork: the child is given the same words and runs Flower's own program. Nothing else differs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from fedtailor.flower.local import LocalLink

PROGRAMS = ("flwr-clientapp", "flwr-serverapp")
STAND_IN = """#!{python} -IS
import json, os, socket, subprocess, sys, time
place = {folder!r} + "/" + str(os.getppid())
for trial in range(3000):
    asked = socket.socket(socket.AF_UNIX)
    try:
        asked.connect(place)
        break
    except OSError:
        try:
            os.close(os.open(place + ".started", os.O_CREAT | os.O_EXCL))
            subprocess.Popen([{python!r}, {file!r}, place], stdin=subprocess.DEVNULL)
        except FileExistsError:
            time.sleep(0.1)
asked.sendall(json.dumps(sys.argv).encode() + b"\\n")
sys.exit(int(asked.recv(16) or b"1"))
"""


@contextmanager
def warm_processes(folder: Path) -> Iterator[None]:
    """In this block, processes of a ``LocalLink`` are forked."""
    folder.mkdir(parents=True)
    for program in PROGRAMS:
        text = STAND_IN.format(python=sys.executable, folder=str(folder), file=__file__)
        (folder / program).write_text(text, encoding="utf-8")
        (folder / program).chmod(0o755)
    cold = LocalLink.environment.fget
    assert cold is not None

    def environment(link: LocalLink) -> dict[str, str]:
        found: dict[str, str] = cold(link)
        return {**found, "PATH": f"{folder}{os.pathsep}{found['PATH']}"}

    with patch.object(LocalLink, "environment", property(environment)):
        yield


def serve(place: str) -> None:
    """Fork for everyone who asks, until the process that started us is gone."""
    import flwr.superlink.cli
    import flwr.supernode.cli
    import flwr.supernode.runtime.run_clientapp

    import fedtailor.flower.apps
    import fedtailor.flower.server  # noqa: F401

    programs = {
        "flwr-clientapp": flwr.supernode.cli.flwr_clientapp,
        "flwr-serverapp": flwr.superlink.cli.flwr_serverapp,
    }
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen(64)
    listening.settimeout(1.0)
    while Path(f"/proc/{Path(place).name}").exists():
        try:
            asked, _ = listening.accept()
        except TimeoutError:
            continue
        asked.settimeout(None)
        if os.fork():
            asked.close()
            _reap()
            continue
        listening.close()
        words = json.loads(asked.makefile("r").readline())
        child = os.fork()
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            asked.sendall(str(status & 255).encode())
            os._exit(0)
        asked.close()
        sys.argv = words
        sys.exit(programs[Path(words[0]).name]())


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    serve(sys.argv[1])
