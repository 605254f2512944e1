"""Those who do not belong here are turned away with a sentence, and the SuperLink goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.errors import FedtailorError
from fedtailor.flower.keys import write_authority, write_node_key
from fedtailor.flower.link import Link
from fedtailor.flower.local import LocalLink, free_port, local_link
from fedtailor.flower.submit import submit
from flower.link.real import parts, same, there
from flower.link.warm import warm_processes
from flower.test_same_bits import CONFIG

pytestmark = pytest.mark.slow
TEXT = CONFIG.replace("{method}", "fedavg").replace("rounds = 3", "rounds = 1")


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLink]:
    """After all that strangers have tried, the same SuperLink runs a round to the right bits."""
    folder = tmp_path_factory.mktemp("link")
    with warm_processes(folder / "warm"), local_link(folder, parts(folder, 2)) as running:
        yield running
        assert running.online() == 2
        assert all(process.poll() is None for process in running.processes.values())
        submit(TEXT, folder / "there", there(running), lambda _: None)
    assert same(TEXT, folder / "there")


def node_says(link: LocalLink, key: Path | None, *words: str) -> str:
    """What a SuperNode says that is turned away; it must give up by itself."""
    command = [str(Path(sys.executable).parent / "flower-supernode"), "--superlink", link.address, *words]
    command += ["--auth-supernode-private-key", str(key)] if key is not None else []
    command += ["--port", str(free_port()), "--max-retries", "1"]
    log = link.folder / f"stranger{free_port()}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=link.environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=link.folder,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert process.wait(300) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it started itself, which may outlive it
    return log.read_text(encoding="utf-8")


def test_a_run_from_someone_who_believes_another_authority(link: LocalLink, tmp_path: Path) -> None:
    write_authority(tmp_path)
    with pytest.raises(FedtailorError, match="took no run: its certificate is not vouched for by"):
        submit(TEXT, tmp_path / "there", Link(link.address, tmp_path / "ca.crt"), lambda _: None)
    assert not (tmp_path / "there").exists()


def test_a_run_in_plain_text(link: LocalLink, tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match="took no run: it speaks TLS"):
        submit(TEXT, tmp_path / "there", Link(link.address, insecure=True), lambda _: None)
    assert not (tmp_path / "there").exists()


def test_plain_text_to_the_port(link: LocalLink) -> None:
    """Neither answered nor the end of anything: the connection is closed."""
    host, port = link.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        plain.sendall(
            b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd"
        )
        said = plain.recv(4096)
    assert b"200" not in said


def test_a_node_that_nobody_has_registered(link: LocalLink, tmp_path: Path) -> None:
    write_node_key(tmp_path / "stranger.key")
    said = node_says(link, tmp_path / "stranger.key", "--root-certificates", str(link.authority))
    assert "Failed to activate SuperNode" in said


def test_a_node_that_believes_another_authority(link: LocalLink, tmp_path: Path) -> None:
    write_authority(tmp_path)
    said = node_says(link, link.folder / "node0.key", "--root-certificates", str(tmp_path / "ca.crt"))
    assert "CERTIFICATE_VERIFY_FAILED" in said


def test_a_node_in_plain_text(link: LocalLink) -> None:
    assert "Failed to initialize the connection to the SuperLink" in node_says(link, None, "--insecure")


def test_a_node_that_would_show_its_key_in_plain_text(link: LocalLink) -> None:
    said = node_says(link, link.folder / "node0.key", "--insecure")
    assert "SuperNode authentication requires a secure TLS connection" in said
