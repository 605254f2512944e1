"""A SuperLink and SuperNodes on this machine, over TLS with fresh keys, for trying things out.

Everything lies in one folder and ends with the block: processes are stopped by their own numbers, with all that is in
their sessions. What Flower starts in sessions of its own looks after its parent, and ends some seconds later. Nothing
leaves this machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedtailor.errors import FedtailorError, require
from fedtailor.flower.keys import AUTHORITY, LOOPBACK, write_authority, write_node_key
from fedtailor.flower.link import CONNECTION, flwr, installed, nodes_of, quiet_environment, write_home
from fedtailor.storage.files import remove_file

FEDERATION = "@none/default"  # the one that every SuperLink has
SUPERLINK = "superlink"  # among the processes; the others are nodes
START_SECONDS, STOP_SECONDS = 180.0, 10.0
KEEPER = (sys.executable, "-m", "fedtailor.flower.keeping")  # in front of the command of a SuperNode


@dataclass
class LocalLink:
    """A SuperLink on loopback, and the SuperNodes that were added to it."""

    folder: Path
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    host: str = LOOPBACK

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.host}:{self.port}"

    @property
    def authority(self) -> Path:
        """The certificate that its own is signed by."""
        return self.folder / "ca.crt"

    @property
    def environment(self) -> dict[str, str]:
        """For every process that talks to it: Flower's own folder is here."""
        return {**quiet_environment(), "FLWR_HOME": str(self.folder / "home")}

    def start_link(self, simulation: bool = False) -> None:
        """Start the SuperLink; what it knows lies in a database, so that it may be killed and started again."""
        kind = "--simulation" if simulation else "--enable-supernode-auth"
        files = {name: str(self.folder / f"server.{name}") for name in ("crt", "key")}
        self._start(
            SUPERLINK, "flower-superlink", "--ssl-certfile", files["crt"], "--ssl-keyfile", files["key"],
            "--ssl-ca-certfile", str(self.authority), kind, "--port", str(self.port),
            "--database", str(self.folder / "superlink.db"), "--host", self.host,
        )  # fmt: skip
        self._wait(lambda: _listening(self.host, self.port), SUPERLINK)

    def add_node(self, number: int, config: Mapping[str, object]) -> None:
        """Register a SuperNode's key and start it; ``config`` is what it says of itself."""
        key = self.folder / f"node{number}.key"
        if not key.is_file():
            self.flwr("supernode", "register", str(write_node_key(key)), CONNECTION)
        self._start(
            f"node{number}", "flower-supernode", "--superlink", self.address, "--root-certificates",
            str(self.authority), "--auth-supernode-private-key", str(key), "--port", str(free_port()),
            "--node-config", node_config(config), kept=True,
        )  # fmt: skip

    def online(self) -> int:
        """How many SuperNodes are connected."""
        return sum(node["status"] == "online" for node in nodes_of(self.flwr))

    def wait_for_nodes(self, count: int) -> None:
        """Until so many are connected; a SuperLink that is too busy to answer is asked again."""

        def ready() -> bool:
            with contextlib.suppress(FedtailorError):
                return self.online() >= count
            return False

        self._wait(ready, f"{count} SuperNodes")

    def flwr(self, *words: str) -> str:
        """What Flower's own command says."""
        return flwr(self.environment, *words)

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process and all that it started."""
        _send(self.processes[name], how)
        self._ended(name)

    def stop_all(self) -> None:
        """Nodes first, all of them at once; whoever has no patience for that ends all that is left."""
        nodes = [name for name in self.processes if name != SUPERLINK]
        try:
            for names in (nodes, [SUPERLINK] if SUPERLINK in self.processes else []):
                for name in names:
                    _send(self.processes[name], signal.SIGTERM)
                for name in names:
                    self._ended(name)
        finally:
            for process in self.processes.values():
                _send(process, signal.SIGKILL)

    def _ended(self, name: str) -> None:
        """Wait for a process that was asked to end, and no longer than it is given for that."""
        process = self.processes[name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _send(process, signal.SIGKILL)
        process.wait()
        del self.processes[name]

    def _start(self, name: str, program: str, *words: str, kept: bool = False) -> None:
        command = [*(KEEPER if kept else ()), str(installed(program)), *words]
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                name = dead[0] if dead else SUPERLINK
                said = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-800:]
                told = "ended" if dead else f"was not there after {START_SECONDS:g} s"
                raise FedtailorError(f"{what} {told}; {name} says: {said}")
            time.sleep(0.2)


@contextlib.contextmanager
def local_link(
    folder: Path, nodes: Sequence[Mapping[str, object]], host: str = LOOPBACK
) -> Iterator[LocalLink]:
    """A SuperLink with these SuperNodes; all of them end with the block."""
    with _stopped(folder, host) as link:
        link.start_link()
        for number, config in enumerate(nodes):
            link.add_node(number, config)
        link.wait_for_nodes(len(nodes))
        yield link


@contextlib.contextmanager
def simulated_link(folder: Path, nodes: int, processors: int = 1) -> Iterator[LocalLink]:
    """A SuperLink whose nodes are simulated on this machine or on a cluster, by Ray; each is given some processors."""
    if importlib.util.find_spec("ray") is None:
        raise FedtailorError('simulated nodes need the extra: pip install "fedtailor[flower-simulation]"')
    with _stopped(folder) as link:
        link.start_link(simulation=True)
        link.flwr(
            "federation", "simulation-config", FEDERATION, CONNECTION, "--num-supernodes", str(nodes),
            "--client-resources-num-cpus", str(processors),
        )  # fmt: skip
        yield link


@contextlib.contextmanager
def _stopped(folder: Path, host: str = LOOPBACK) -> Iterator[LocalLink]:
    """A SuperLink that is to be started, with keys of its own; whatever it is made of ends with the block."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in AUTHORITY:
        remove_file(folder / name)  # of the last time: keys are fresh every time
    write_authority(folder, ("localhost", host))
    link = LocalLink(folder, free_port(), host=host)
    write_home(folder / "home", link.address, link.authority)
    try:
        yield link
    finally:
        link.stop_all()


def node_config(config: Mapping[str, object]) -> str:
    """What a SuperNode says of itself, as ``--node-config`` takes it: to Flower a text ends at a quotation mark."""
    for name, value in config.items():
        require('"' not in str(value), name, value, "a text without quotation marks")
    return " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in config.items())


def _send(process: subprocess.Popen[bytes], how: int) -> None:
    """A signal to a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0
