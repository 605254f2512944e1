"""A device's own SuperNode, and a SuperLink: what they need is checked here, and they are kept running.

This process has loaded PyTorch to check a device's file; it becomes the keeper, which has not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from fedtailor.errors import FedtailorError
from fedtailor.flower.keys import AUTHORITY
from fedtailor.flower.link import Link, installed, quiet_environment
from fedtailor.flower.local import KEEPER, node_config


def run_node(link: Link, key: Path, device: Path, port: int) -> NoReturn:
    """Become the SuperNode of a device, which is started again whenever it is lost."""
    _check_files({"--key": key, "--device": device})
    from fedtailor.flower.device_file import FILE, node_table  # loads PyTorch, which a SuperLink does without

    node_table({FILE: str(device)})
    _become(
        "flower-supernode", "--superlink", link.address, "--root-certificates", str(link.root_certificates),
        "--auth-supernode-private-key", str(key), "--port", str(port),
        "--node-config", node_config({FILE: str(device.absolute())}),
    )  # fmt: skip


def run_link(keys: Path, host: str, port: int, database: Path) -> NoReturn:
    """Become a SuperLink that lets registered nodes in alone, over TLS; what it knows survives its end."""
    files = {name: keys / name for name in AUTHORITY}
    _check_files({f"flower-keys writes {name}:": file for name, file in files.items()})
    _become(
        "flower-superlink", "--host", host, "--port", str(port), "--ssl-ca-certfile", str(files["ca.crt"]),
        "--ssl-certfile", str(files["server.crt"]), "--ssl-keyfile", str(files["server.key"]),
        "--enable-supernode-auth", "--database", str(database.absolute()),
    )  # fmt: skip


def _check_files(files: dict[str, Path]) -> None:
    for name, file in files.items():
        if not file.is_file():
            raise FedtailorError(f"{name} {file}: no such file")


def _become(program: str, *words: str) -> NoReturn:
    command = [*KEEPER, str(installed(program)), *words]
    sys.stdout.flush()
    os.execve(command[0], command, quiet_environment())
