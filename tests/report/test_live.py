"""The page that follows a run: on this machine only, from the folder alone."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.report import live
from fedtailor.report.live import LOOPBACK, WAITING, Server, look, watching
from synthetic_runs import write_run


def ask(server: Server, path: str, **headers: str) -> http.client.HTTPResponse:
    return answered(server, f"/{server.token}{path}", **headers)


def answered(server: Server, path: str, **headers: str) -> http.client.HTTPResponse:
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


def test_without_the_token_of_the_printed_address_nothing_is_told(tmp_path, capfd):
    """Other users of the machine reach the port too."""
    write_run(tmp_path / "run", "fjord", 0.9, 1, rounds=3, finished=False)
    with watching(tmp_path / "run") as server, watching(tmp_path / "run") as other:
        assert server.url == f"http://{LOOPBACK}:{server.server_port}/{server.token}/"
        assert len(server.token) >= 20
        assert server.token != other.token
        for path in (
            "/",
            "/data.json",
            f"/{other.token}/data.json",
            f"/{server.token[:-1]}/",
            "//",
            f"/{server.token}",
        ):
            answer = answered(server, path)
            assert (answer.status, answer.body) == (403, live.NO_TOKEN), path
        page = answered(server, f"/{server.token}/")
        assert page.status == 200
        assert server.token.encode() not in page.body
        assert page.headers["Referrer-Policy"] == "no-referrer"
    shown = capfd.readouterr()
    assert server.token not in shown.out + shown.err
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(server.token.encode() in each for each in files)


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


def test_connections_are_limited_and_who_hangs_up_leaves_no_trace(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(live, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(live._Handler, "timeout", 2)
    monkeypatch.setattr(live, "look", lambda _path: (live.WAITING, []))
    with watching(tmp_path) as server:
        address = ("127.0.0.1", server.server_port)
        idle = [socket.create_connection(address, timeout=20) for _ in range(2)]
        assert until(lambda: server._slots._value == 0)
        late = socket.create_connection(address, timeout=1)
        assert late.recv(1) == b""  # turned away at once
        assert [each.recv(1) for each in idle] == [b"", b""]  # closed, because they said nothing
        rude = socket.create_connection(address)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.sendall(f"GET /{server.token}/data.json HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n".encode())
        rude.close()
        assert until(lambda: server._slots._value == 2)  # every place was given back
        for each in (*idle, late):
            each.close()
    assert "Traceback" not in capfd.readouterr().err


def until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()
