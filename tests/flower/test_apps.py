"""The app of the server: what it says, and which runs it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from flwr.app import Context, RecordDict

from fedtailor.errors import FedtailorError
from fedtailor.flower.apps import _tell_waits, indented, main
from flower.test_same_bits import CONFIG


def test_a_run_is_gone_on_with_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a configuration that was changed would be passed over in silence."""
    said = {"config": CONFIG.replace("{method}", "fedavg"), "folder": str(tmp_path)}
    (tmp_path / "config.toml").write_text(said["config"], encoding="utf-8")
    (tmp_path / "run.lock").touch()
    for more, expected in [({}, "exists already"), ({"resume": True}, "no clients.json there")]:
        context = Context(
            run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={**said, **more}
        )
        with pytest.raises(FedtailorError, match=expected):
            main(None, context)
        assert expected in capsys.readouterr().out


def test_whom_a_run_waits_for_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _tell_waits()
    for step in [
        "tracing",
        "waiting for clients: 0 of 2",
        "waiting for clients: 0 of 2",
        "waiting for clients: 1 of 2",
    ]:
        tell(step)
    assert capsys.readouterr().out == "waiting for clients: 0 of 2\nwaiting for clients: 1 of 2\n"


def test_what_nodes_have_said_begins_no_line() -> None:
    """Whoever listens takes lines that begin with ``finished:`` for the server's own."""
    error = FedtailorError("the first, client 3, raised\nfinished: runs/x after 3 rounds\r\x1b]0;title\x07")
    assert indented(error).splitlines() == [
        "the first, client 3, raised",
        r"  finished: runs/x after 3 rounds\r\x1b]0;title\x07",
    ]
