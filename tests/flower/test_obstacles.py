"""What stands in the way to a SuperLink is said: nobody listens, no TLS is spoken, the certificate is a stranger's."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra fedtailor[flower] is not installed")

from fedtailor.errors import FedtailorError
from fedtailor.flower.keys import write_authority
from fedtailor.flower.link import Link, obstacle
from fedtailor.flower.local import free_port
from fedtailor.flower.submit import submit


@contextmanager
def listening(folder: Path | None) -> Iterator[str]:
    """Someone who takes one connection: over TLS with the certificate in a folder, or in plain text."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with suppress(OSError):
                taken, _ = server.accept()
                with taken:
                    if folder is None:
                        taken.recv(64)
                        taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        return
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(folder / "server.crt", folder / "server.key")
                    with context.wrap_socket(taken, server_side=True) as safe:
                        safe.recv(64)

        thread = threading.Thread(target=take)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(20)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("other")
    for folder in folders:
        write_authority(folder)
    return folders


def test_nothing_is_in_the_way(authorities: tuple[Path, Path]) -> None:
    with listening(authorities[0]) as address:
        assert obstacle(Link(address, authorities[0] / "ca.crt")) == ""
    with listening(None) as address:
        assert obstacle(Link(address, insecure=True)) == ""


def test_certificates_hold_where_python_is_strict(
    authorities: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.13 on it always is."""

    def strict(link: Link) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=link.root_certificates)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(Link, "trust", strict)
    with listening(authorities[0]) as address:
        assert obstacle(Link(address, authorities[0] / "ca.crt")) == ""


def test_a_key_is_no_certificate(authorities: tuple[Path, Path]) -> None:
    with pytest.raises(FedtailorError, match="server.key: no certificate can be read there"):
        Link("here:8000", authorities[0] / "server.key")


def test_an_address_in_brackets() -> None:
    assert Link("[::1]:8000").place == ("::1", 8000)
    assert "Name or service" not in obstacle(Link(f"[::1]:{free_port()}", insecure=True))


def test_another_authority(authorities: tuple[Path, Path]) -> None:
    with listening(authorities[0]) as address:
        told = obstacle(Link(address, authorities[1] / "ca.crt"))
    assert told.startswith(f"its certificate is not vouched for by {authorities[1] / 'ca.crt'} (")
    with listening(authorities[0]) as address:
        assert "by the authorities that this machine knows" in obstacle(Link(address))


def test_plain_text_and_tls(authorities: tuple[Path, Path]) -> None:
    with listening(authorities[0]) as address:
        assert obstacle(Link(address, insecure=True)).startswith("it speaks TLS: instead of --insecure")
    with listening(None) as address:
        assert obstacle(Link(address, authorities[0] / "ca.crt")).startswith("it does not speak TLS")


def test_nobody_listens() -> None:
    assert "cannot be reached" in obstacle(Link(f"127.0.0.1:{free_port()}", insecure=True))


@pytest.mark.parametrize(
    "cause",
    ["ValueError: no room for 64 processors", "Exception: The current node timed out during startup."],
)
def test_a_run_that_ended_says_why(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of errors that were raised from each other the first is the cause; Flower's own last words say none."""
    said = f"started run 5\\n{cause}\\nRuntimeError: Ending.\\nExit Code: 700\\n"
    program = tmp_path / "flwr"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr("fedtailor.flower.submit.installed", lambda _: program)
    with pytest.raises(FedtailorError, match=f"ended on the SuperLink: {cause}$"):
        submit('name = "a"\n', tmp_path / "run", Link("127.0.0.1:9", insecure=True), lambda _: None)
