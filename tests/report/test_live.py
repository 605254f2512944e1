"""The page that follows a run: on this machine only, from the folder alone."""

from __future__ import annotations

import http.client
import json

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.report.live import LOOPBACK, WAITING, Server, look, watching
from synthetic_runs import write_run


def ask(server: Server, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=60)
    connection.request(
        "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    answer.body = answer.read()
    connection.close()
    return answer


def test_the_data_follows_the_folder(tmp_path):
    with watching(tmp_path / "run") as server:
        assert server.server_address[0] == LOOPBACK
        assert json.loads(ask(server, "/data.json").body)["state"] == WAITING
        run = write_run(tmp_path / "run", "fjord", 0.9, 1, rounds=3, finished=False)
        first = ask(server, "/data.json")
        assert "interrupted, round 3 of 3" in json.loads(first.body)["state"]
        tag = first.headers["ETag"]
        assert ask(server, "/data.json", If_None_Match=tag).status == 304
        (run / "weights.safetensors").write_bytes(b"")
        again = ask(server, "/data.json", If_None_Match=tag)
        assert again.status == 200
        assert "finished" in json.loads(again.body)["state"]


def test_only_this_machine_and_only_these_addresses(tmp_path):
    with watching(tmp_path) as server:
        assert ask(server, "/data.json", Host="evil.example:80").status == 403
        assert ask(server, "/../../etc/passwd").status == 404
        assert ask(server, "/metrics.jsonl").status == 404


def test_a_half_written_line_is_not_shown(tmp_path):
    run = write_run(tmp_path / "run", "fjord", 0.9, 1, rounds=3, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "clie')
    state, panels = look(tmp_path / "run")
    assert "round 3 of 3" in state
    assert panels


def test_a_port_that_is_taken_is_said(tmp_path):
    with watching(tmp_path) as server, pytest.raises(FedtailorError, match=f"--port {server.server_port}"):
        Server(tmp_path, server.server_port)
