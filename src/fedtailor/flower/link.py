"""Where a SuperLink listens, and Flower's own commands, as far as we call them.

Nothing leaves for anywhere else: telemetry, the search for updates and installations are off.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import FedtailorError, one_line, require

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "fedtailor"  # one called ``local`` would start a simulation of its own
NODE = ("node-id", "status", "online-at")
CALL_SECONDS, REACH_SECONDS = 120.0, 10.0
Call = Callable[..., str]  # what Flower's command says to some words


@dataclass(frozen=True)
class Link:
    """Where a SuperLink listens, and whom to believe that it is the one."""

    address: str
    root_certificates: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        host, colon, port = self.address.rpartition(":")
        fine = bool(host) and bool(colon) and port.isdecimal() and "/" not in host
        require(fine, "--superlink", self.address, "host:port, such as 10.0.0.5:8000")
        if self.root_certificates is not None and not self.root_certificates.is_file():
            raise FedtailorError(f"--root-certificates {self.root_certificates}: no such file")
        try:
            self.trust()
        except OSError as error:
            raise FedtailorError(
                f"--root-certificates {self.root_certificates}: no certificate can be read there ({error.strerror}); "
                "expected the authority's, ca.crt"
            ) from error

    @property
    def place(self) -> tuple[str, int]:
        """Its host and port, as sockets take them."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def trust(self) -> ssl.SSLContext:
        """Whom to believe, as TLS asks for it."""
        return ssl.create_default_context(cafile=self.root_certificates)

    def home(self, folder: Path) -> dict[str, str]:
        """The environment of Flower's command, with a folder of its own that knows this SuperLink."""
        write_home(folder, self.address, self.root_certificates, self.insecure)
        return {**quiet_environment(), "FLWR_HOME": str(folder)}


def obstacle(link: Link) -> str:
    """What stands in the way to a SuperLink, if anything does: to Flower's command all of it is unavailable."""
    context = link.trust()
    if link.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(link.place, REACH_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=link.place[0]),
        ):
            told = "it speaks TLS: instead of --insecure, name the certificate of its authority, --root-certificates"
            return told if link.insecure else ""
    except ssl.SSLCertVerificationError as error:
        authority = link.root_certificates or "the authorities that this machine knows"
        return f"its certificate is not vouched for by {authority} ({error.verify_message})"
    except ssl.SSLError:
        return "" if link.insecure else "it does not speak TLS; on a network of your own there is --insecure"
    except OSError as error:
        return f"it cannot be reached ({error})"


def quiet_environment() -> dict[str, str]:
    """For Flower's programs, of which some start others: those beside this Python."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET, "PATH": programs}


def write_home(folder: Path, address: str, root_certificates: Path | None, insecure: bool = False) -> None:
    """A folder for Flower's command that knows one SuperLink, under the name of ``CONNECTION``."""
    lines = ["[superlink]", f'default = "{CONNECTION}"', f"[superlink.{CONNECTION}]"]
    lines.append(f"address = {json.dumps(address)}")
    if root_certificates is not None:
        lines.append(f"root-certificates = {json.dumps(str(root_certificates.absolute()))}")
    if insecure:
        lines.append("insecure = true")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("\n".join([*lines, ""]), encoding="utf-8")


def flwr(environment: Mapping[str, str], *words: str) -> str:
    """What Flower's own command says."""
    command, told = [str(installed("flwr")), *words], f"flwr {' '.join(words[:2])}"
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=CALL_SECONDS, check=False, encoding="utf-8",
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FedtailorError(f"{told}: no answer after {CALL_SECONDS:g} s") from None
    if done.returncode:
        raise FedtailorError(f"{told}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def nodes_of(call: Call) -> list[dict[str, str]]:
    """The SuperNodes that a SuperLink knows, with their status."""
    listed = _listed(call, "supernode", "list", CONNECTION, "--format", "json", key="nodes")
    return [{key: str(node.get(key, "")) for key in NODE} for node in listed]


def status_of(call: Call, run: str) -> str:
    """What a SuperLink says that a run does: ``running``, or how it has ended, such as ``finished:failed``."""
    listed = _listed(call, "list", CONNECTION, "--run-id", run, "--format", "json", key="runs")
    return str(listed[0].get("status", "")) if listed else ""


def _listed(call: Call, *words: str, key: str) -> list[dict[str, Any]]:
    """A list that Flower's command gives as JSON; it says there, and not by its exit code, that it has none."""
    said, told = call(*words), f"flwr {' '.join(words[: words.index(CONNECTION)])}"
    try:
        table = json.loads(said)
        listed = list(table.get(key, []))
        problem = "" if table.get("success", True) else str(table.get("error-message"))
    except (ValueError, TypeError, AttributeError):
        listed, problem = [None], ""
    if problem:
        raise FedtailorError(f"{told}: {one_line(problem, 400)}")
    if not all(isinstance(each, dict) for each in listed):
        raise FedtailorError(f"{told}: expected {key}, not {one_line(said, 200)!r}")
    return listed


def installed(program: str) -> Path:
    """One of Flower's programs, beside this Python."""
    found = Path(sys.executable).parent / program
    if not found.is_file():
        raise FedtailorError(f'{program} is not installed: pip install "fedtailor[flower]"')
    return found
