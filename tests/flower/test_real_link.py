"""Over a real SuperLink on loopback, with TLS and registered SuperNodes. Flower starts a process for every message."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.config import make_config
from fedtailor.errors import FedtailorError
from fedtailor.flower.keys import write_authority
from fedtailor.flower.local import LocalLink, local_link
from fedtailor.flower.submit import Link, submit
from fedtailor.methods.registry import method_names
from fedtailor.run.interface import run_config
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights

pytestmark = pytest.mark.slow
NODES = 4


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLink]:
    folder = tmp_path_factory.mktemp("link")
    parts = [
        {"partition-id": n, "num-partitions": NODES, "state": str(folder / f"client{n}")}
        for n in range(NODES)
    ]
    with local_link(folder, parts) as running:
        yield running


def there(link: LocalLink) -> Link:
    return Link(link.address, link.authority)


def same(text: str, folder: Path) -> bool:
    """Whether a run has the bits of the run in process."""
    run_config(make_config(tomllib.loads(text)), folder.with_name("here"), on_notice=lambda _: None)
    return not differing(final_weights(folder.with_name("here")), final_weights(folder))


@pytest.mark.parametrize("method", method_names())
def test_every_method_has_the_bits_of_the_run_in_process(
    method: str, link: LocalLink, tmp_path: Path
) -> None:
    text, said = CONFIG.replace("{method}", method), list[str]()
    submit(text, tmp_path / "there", there(link), said.append)
    assert [line.split()[1] for line in said if line.startswith("round")] == ["1", "2", "3"]
    assert same(text, tmp_path / "there")


def killed_when(folder: Path, rounds: int, kill: object) -> threading.Thread:
    """Call ``kill`` once so many rounds have been saved."""

    def watch() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            file = folder / "metrics.jsonl"
            if file.is_file() and len(file.read_text(encoding="utf-8").splitlines()) >= rounds:
                kill()  # type: ignore[operator]
                return
            time.sleep(0.2)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def server_processes(folder: Path) -> list[int]:
    """The processes that hold a run's lock open."""
    lock, found = str(folder / "run.lock"), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(each) == lock for each in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def test_a_killed_server_app_is_gone_on_with(link: LocalLink, tmp_path: Path) -> None:
    text, folder = CONFIG.replace("{method}", "flado").replace("rounds = 3", "rounds = 6"), tmp_path / "there"

    def kill() -> None:
        for number in server_processes(folder):
            os.kill(number, signal.SIGKILL)

    watcher = killed_when(folder, 2, kill)
    with pytest.raises(FedtailorError):
        submit(text, folder, there(link), lambda _: None)
    watcher.join()
    submit(text, folder, there(link), lambda _: None)
    assert same(text, folder)


def test_a_killed_node_comes_back(link: LocalLink, tmp_path: Path) -> None:
    text = CONFIG.replace("{method}", "heterofl").replace("rounds = 3", "rounds = 4")
    text = text.replace("workers = 0", "workers = 0\ndeadline = 90")
    folder = tmp_path / "there"

    def kill() -> None:
        link.stop("node3", signal.SIGKILL)
        config = {"partition-id": 3, "num-partitions": NODES, "state": str(link.folder / "client3")}
        link.add_node(3, config)

    watcher = killed_when(folder, 1, kill)
    submit(text, folder, there(link), lambda _: None)
    watcher.join()
    assert (folder / "weights.safetensors").is_file()


def test_strangers_are_refused(link: LocalLink, tmp_path: Path) -> None:
    text = CONFIG.replace("{method}", "fedavg")
    write_authority(tmp_path)
    before = link.online()
    with pytest.raises(FedtailorError, match="took no run"):
        submit(text, tmp_path / "there", Link(link.address, tmp_path / "ca.crt"), lambda _: None)
    with pytest.raises(FedtailorError, match="took no run"):
        submit(text, tmp_path / "there", Link(link.address, insecure=True), lambda _: None)
    assert not (tmp_path / "there").exists()
    assert link.online() == before
