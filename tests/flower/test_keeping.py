"""A SuperNode that ends is started again; one that is asked to end, or asks for what there is not, is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.flower.keeping import keep
from fedtailor.flower.keys import write_authority, write_keys, write_node_key

COUNT = """
import pathlib, sys
file = pathlib.Path(sys.argv[1])
times = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(times))
sys.exit(0 if times == 3 else int(sys.argv[2]))
"""


def test_what_ends_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", COUNT, str(tmp_path / "times")]
    assert keep([*command, "305"], pause=0.01) == 0
    assert (tmp_path / "times").read_text() == "3"
    assert capfd.readouterr().out.count("starting it again in 0.01 s") == 2


def test_wrong_words_are_no_reason_to_try_again(tmp_path: Path) -> None:
    assert keep([sys.executable, "-c", COUNT, str(tmp_path / "times"), "2"], pause=0.01) == 2
    assert (tmp_path / "times").read_text() == "1"


def test_a_link_that_never_listens_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "flower-superlink"
    program.write_text(
        '#!/bin/sh\necho once >> "$0.times"\ntest $(wc -l < "$0.times") -gt 9\n', encoding="utf-8"
    )
    program.chmod(0o755)
    assert keep([str(program)], pause=0.0) == 1
    said = capfd.readouterr().out
    assert said.count("starting it again") == 4
    assert "node that was lost" not in said
    assert "5 times at once: see above why; is its port taken?" in said


def test_both_end_when_the_keeper_is_asked_to(tmp_path: Path) -> None:
    sleeper = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-c", sleeper, str(tmp_path / "pid")]
    keeper = subprocess.Popen([sys.executable, "-m", "fedtailor.flower.keeping", *command])
    end = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    inner = int((tmp_path / "pid").read_text())
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(inner, 0)


def test_keys_are_written_once(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra fedtailor[flower] is not installed")
    from cryptography import x509

    (public,) = write_keys(tmp_path / "keys", ["server.example.org", "192.0.2.10"], ["phone"], 10)
    assert public.name == "phone.pub"
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.10", "127.0.0.1"]
    assert (tmp_path / "keys" / "phone.key").stat().st_mode & 0o077 == 0
    before = (tmp_path / "keys" / "ca.crt").read_bytes()
    write_keys(tmp_path / "keys", [], ["tablet"], 10)
    assert (tmp_path / "keys" / "ca.crt").read_bytes() == before
    for folder, hosts, nodes, expected in [
        ("keys", ["other"], [], "has an authority already"),
        ("keys", [], ["phone"], "phone.key exists already"),
        ("new", [], ["phone"], "--host = '': expected a name or an address"),
        ("new", ["https://here:8000"], [], "--host = 'https://here:8000'"),
        ("new", ["here"], ["../phone"], "--node = '../phone'"),
        ("new", ["here"], ["a" * 65], "expected up to 64 letters"),
        ("keys/ca.crt", ["here"], [], "ca.crt.* cannot be written: "),
    ]:
        with pytest.raises(FedtailorError, match=expected):
            write_keys(tmp_path / folder, hosts, nodes, 10)
    with pytest.raises(FedtailorError, match="--days = 10000000: expected 1 to 36,500"):
        write_keys(tmp_path / "new", ["here"], [], 10_000_000)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["server.key", "server.crt", "phone.key", "phone.pub"])
def test_keys_go_through_no_link_and_into_no_file(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra fedtailor[flower] is not installed")
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedtailorError, match=f"{name} exists already: it stays as it is"):
        write_keys(folder, ["here"], ["phone"], 10)
    with pytest.raises(FedtailorError, match=f"{name} cannot be written"):
        (write_authority if name.startswith("server") else write_node_key)(
            folder if name.startswith("server") else folder / "phone.key"
        )
    assert not (tmp_path / "elsewhere").exists()
    assert not (folder / "ca.crt").exists()


def test_a_link_and_its_keeper_need_no_pytorch() -> None:
    code = "import sys; from fedtailor.flower import keeping, node, register; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
