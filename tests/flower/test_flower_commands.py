"""Flower's own commands: what they say is for people to read, and what they do not say is no reason to hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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


SILENT = None  # instead of a line
AWAY = {"success": False, "error-message": "Connection refused."}
GOING, ENDED, PENDING = (
    {"success": True, "runs": [{"status": status}]} for status in ("running", "finished:failed", "pending")
)


def silent_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str | None], *answers: dict[str, object]
) -> list[str]:
    """A run of which this is heard; ``answers`` are what the SuperLink says to those who ask about it."""
    file, left = program(tmp_path, ""), list(answers)

    def asked(_environment: object, *words: str) -> str:
        assert words == ("list", "fedtailor", "--run-id", "5", "--format", "json")
        return json.dumps(left.pop(0))

    monkeypatch.setattr(submit, "installed", lambda _name: file)
    monkeypatch.setattr(submit, "flwr", asked)
    monkeypatch.setattr(submit, "_as_they_come", lambda _lines: iter(lines))
    heard: list[str] = []
    submit.submit("", tmp_path / "run", Link("here:1"), heard.append)
    assert not left
    return heard


def test_a_superlink_that_is_gone_is_not_listened_to_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = r"at here:1 has not answered 3 times in a row: flwr list: Connection refused\. The run may go on there"
    with pytest.raises(FedtailorError, match=told):
        silent_run(tmp_path, monkeypatch, ["started run 5", *[SILENT] * 4], AWAY, AWAY, AWAY)
    with pytest.raises(FedtailorError, match="3 times in a row: it has not said yet that it takes the run"):
        silent_run(tmp_path, monkeypatch, [SILENT] * 4)


def test_a_run_that_has_ended_unheard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedtailorError, match=r"run 5 has ended on the SuperLink \(finished:failed\)"):
        silent_run(tmp_path, monkeypatch, ["started run 5", SILENT, SILENT, SILENT], GOING, ENDED, ENDED)


def test_a_run_that_is_only_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its last words come late, and where the SuperLink was away in between."""
    slow = ["started run 5", SILENT, SILENT, SILENT, "round 1", SILENT, SILENT, SILENT, "finished: here"]
    silent_run(tmp_path, monkeypatch, slow, GOING, AWAY, AWAY, AWAY, AWAY, ENDED)


def test_the_end_of_a_superlink_is_told_without_what_the_run_had_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str | None] = [
        "started run 5",
        "waiting for clients: 0 of 4",
        "round 1",
        "Error: unavailable.",
    ]
    told = "^the run ended on the SuperLink: started run 5 Error: unavailable.$"
    with pytest.raises(FedtailorError, match=told):
        silent_run(tmp_path, monkeypatch, lines)


def test_a_server_that_does_not_begin_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = silent_run(tmp_path, monkeypatch, ["started run 5", SILENT, "finished: here"], PENDING)
    assert heard[0].startswith(
        "waiting for the SuperLink to start the run's server (pending): Flower gives a "
    )


def test_a_server_that_never_begins_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(submit, "_stop", lambda _program, number, *_: stopped.append(number))
    pending = [PENDING] * submit.MOST_PENDING
    told = r"has not started the server of run 5 for 30 minutes \(pending\), and was asked to stop it: Flower gives"
    with pytest.raises(FedtailorError, match=told):
        silent_run(tmp_path, monkeypatch, ["started run 5", *[SILENT] * 16, "finished: here"], *pending)
    assert stopped == ["5"]
    once_more = [*[SILENT] * 14, "round 1", *[SILENT] * 14]  # a word in between: the count begins anew
    silent_run(tmp_path, monkeypatch, ["started run 5", *once_more, "finished: here"], *[PENDING] * 28)
    assert stopped == ["5"]


def test_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "SILENCE_SECONDS", 0.01)
    go_on = threading.Event()

    def lines() -> Iterator[str]:
        yield "one"
        assert go_on.wait(20)
        yield "two"

    heard: list[str | None] = []
    for line in submit._as_they_come(lines()):
        heard.append(line)
        if line is SILENT:
            go_on.set()
    assert [line for line in heard if line is not SILENT] == ["one", "two"]
    assert SILENT in heard[1:-1]


def test_nothing_from_elsewhere_steers_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "started run 5\nround 1\x1b]0;title\x07\nerror: client \x9b31m has failed\n"
    file = program(tmp_path, f"print({said!r}, end='')")
    monkeypatch.setattr(submit, "installed", lambda _name: file)
    heard: list[str] = []
    with pytest.raises(FedtailorError) as refused:
        submit.submit("", tmp_path / "run", Link("here:1"), heard.append)
    assert str(refused.value) == r"client \x9b31m has failed"
    assert heard == [r"round 1\x1b]0;title\x07", r"error: client \x9b31m has failed"]


def test_what_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = program(tmp_path, r"import os; os.write(1, b'started run 5\nround 1 \xff\nerror: over\n')")
    for module in (submit, at_link):
        monkeypatch.setattr(module, "installed", lambda _name: file)
    heard: list[str] = []
    with pytest.raises(FedtailorError, match="^over$"):
        submit.submit("", tmp_path / "run", Link("here:1"), heard.append)
    assert heard == ["round 1 \N{REPLACEMENT CHARACTER}", "error: over"]
    assert "round 1 \N{REPLACEMENT CHARACTER}" in flwr(os.environ, "list")


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
