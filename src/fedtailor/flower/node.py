"""A device's own SuperNode: what it says of itself is checked here, and the node is kept running."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedtailor.errors import FedtailorError
from fedtailor.flower.device_file import FILE, node_table
from fedtailor.flower.local import KEEPER, QUIET, installed
from fedtailor.flower.submit import Link


def run_node(link: Link, key: Path, device: Path, port: int) -> None:
    """Become the keeper of a SuperNode; this process has loaded PyTorch to check the file, the keeper has not."""
    for name, file in (("--key", key), ("--device", device)):
        if not file.is_file():
            raise FedtailorError(f"{name} {file}: no such file")
    node_table({FILE: str(device)})
    config = f'{FILE}="{device.absolute()}"'
    command = [
        *KEEPER, str(installed("flower-supernode")), "--superlink", link.address,
        "--root-certificates", str(link.root_certificates), "--auth-supernode-private-key", str(key),
        "--port", str(port), "--node-config", config,
    ]  # fmt: skip
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.execve(command[0], command, {**os.environ, **QUIET, "PATH": programs})
