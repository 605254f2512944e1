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
from fedtailor.flower import link as at_link
from fedtailor.flower import submit
from fedtailor.flower.link import Link, flwr, nodes_of, status_of
from fedtailor.flower.local import LocalLink, node_config


def program(tmp_path: Path, code: str) -> Path:
    """A stand-in for ``flwr``."""
    file = tmp_path / "flwr"
    file.write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_a_command_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = program(tmp_path, "import time; time.sleep(60)")
    monkeypatch.setattr(at_link, "installed", lambda _name: file)
    monkeypatch.setattr(at_link, "CALL_SECONDS", 0.2)
    with pytest.raises(FedtailorError, match=r"flwr supernode list: no answer after 0\.2 s"):
        flwr(os.environ, "supernode", "list")


@pytest.mark.parametrize("said", ["", "oops\n\x1b[31m", "[1]", '{"nodes": 5}', '{"nodes": [5]}'])
def test_a_list_of_nodes_that_is_none(said: str) -> None:
    with pytest.raises(FedtailorError, match="flwr supernode list: expected nodes, not "):
        nodes_of(lambda *_words: said)


def test_a_list_that_could_not_be_made_is_not_an_empty_one() -> None:
    """Flower's command ends with 0 all the same."""
    said = '{"success": false, "error-message": "Connection to the SuperLink\\n is unavailable."}'
    with pytest.raises(FedtailorError, match=r"^flwr supernode list: Connection to the SuperLink is unavail"):
        nodes_of(lambda *_words: said)
    with pytest.raises(FedtailorError, match=r"^flwr list: Connection to the SuperLink is unavail"):
        status_of(lambda *_words: said, "5")


def test_what_a_node_says_of_itself_reaches_flower_whole() -> None:
    parse = pytest.importorskip("flwr.common.config").parse_config_args
    given = {"device": "/a folder/älter's.toml", "partition-id": 1}
    assert parse([node_config(given)]) == given
    with pytest.raises(FedtailorError, match="expected a text without quotation marks"):
        node_config({"device": 'a"b'})


SILENT = """
import json, sys, time
asked = {folder!r} + "/asked"
if sys.argv[1] == "run":
    print("started run 5", flush=True)
    if {speaks!r}:
        time.sleep(0.5)
        print("finished: here", flush=True)
        sys.exit()
    time.sleep(60)
open(asked, "a").write(" ".join(sys.argv[1:]) + "\\n")
print(json.dumps({answer!r}))
"""
AWAY = {"success": False, "error-message": "Connection refused."}


def silent_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], speaks: bool = False
) -> None:
    """A run of which nothing more is heard; ``answer``: what the SuperLink says that is asked about it."""
    file = program(tmp_path, SILENT.format(folder=str(tmp_path), answer=answer, speaks=speaks))
    for module in (submit, at_link):
        monkeypatch.setattr(module, "installed", lambda _name: file)
    monkeypatch.setattr(submit, "SILENCE_SECONDS", 0.1)
    submit.submit("", tmp_path / "run", Link("here:1"), lambda _line: None)


def test_a_superlink_that_is_gone_is_not_listened_to_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FedtailorError, match=r"at here:1 has not answered 3 times in a row: .*: Connection refused"
    ):
        silent_run(tmp_path, monkeypatch, AWAY)
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["list fedtailor --run-id 5 --format json"] * 3


def test_a_run_that_has_ended_unheard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"success": True, "runs": [{"status": "finished:failed"}]}
    with pytest.raises(FedtailorError, match=r"run 5 has ended on the SuperLink \(finished:failed\)"):
        silent_run(tmp_path, monkeypatch, ended)


def test_a_run_that_is_only_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_run(tmp_path, monkeypatch, {"success": True, "runs": [{"status": "running"}]}, speaks=True)
    assert (tmp_path / "asked").is_file()


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
