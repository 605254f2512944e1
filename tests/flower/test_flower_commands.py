"""Flower's own commands: what they say is for people to read, and what they do not say is no reason to hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.flower import local, submit
from fedtailor.flower.local import Link, LocalLink, flwr, nodes_of


def program(tmp_path: Path, code: str) -> Path:
    """A stand-in for ``flwr``."""
    file = tmp_path / "flwr"
    file.write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_a_command_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = program(tmp_path, "import time; time.sleep(60)")
    monkeypatch.setattr(local, "installed", lambda _name: file)
    monkeypatch.setattr(local, "CALL_SECONDS", 0.2)
    with pytest.raises(FedtailorError, match=r"flwr supernode list: no answer after 0\.2 s"):
        flwr(os.environ, "supernode", "list")


@pytest.mark.parametrize("said", ["", "oops\n\x1b[31m", "[1]", '{"nodes": 5}', '{"nodes": [5]}'])
def test_a_list_of_nodes_that_is_none(said: str) -> None:
    with pytest.raises(FedtailorError, match="flwr supernode list: expected nodes, not "):
        nodes_of(lambda *_words: said)


def test_nothing_from_elsewhere_steers_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "started run 5\nround 1\x1b]0;title\x07\nerror: client \x9b31m has failed\n"
    file = program(tmp_path, f"print({said!r}, end='')")
    monkeypatch.setattr(submit, "installed", lambda _name: file)
    heard: list[str] = []
    with pytest.raises(FedtailorError) as refused:
        submit.submit("", tmp_path / "run", Link("here:1"), heard.append)
    assert str(refused.value) == r"client \x9b31m has failed"
    assert heard == [r"round 1\x1b]0;title\x07", r"error: client \x9b31m has failed"]


def test_nothing_is_left_after_a_second_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever presses Ctrl-C again does not want to wait; all that was started ends at once."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    link = LocalLink(tmp_path, 1)
    for name in ("superlink", "node0", "node1"):
        link.processes[name] = subprocess.Popen(
            [sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE
        )
    started = list(link.processes.values())
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()

    def interrupted(_process: object, _seconds: float | None = None) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.stop_all()
    end = time.monotonic() + 20
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        time.sleep(0.01)
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 3
