"""Which SuperNodes a SuperLink lets in, and which of them are connected."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fedtailor.errors import FedtailorError
from fedtailor.flower.link import CONNECTION, Link, flwr, nodes_of, obstacle

SECONDS = 120.0  # a SuperLink that was started a moment ago takes some to listen
KNOWN = ("already", "in use")  # how Flower says that a key is registered


def register(link: Link, keys: Sequence[Path]) -> list[dict[str, str]]:
    """Register public keys, of which the SuperLink may know some; all nodes that it knows then."""
    for key in keys:
        if not key.is_file():
            raise FedtailorError(f"--add {key}: no such file")
    with tempfile.TemporaryDirectory() as place:
        environment = link.home(Path(place))
        _wait_for(link)
        if told := obstacle(link):
            raise FedtailorError(f"--superlink {link.address}: {told}")
        for key in keys:
            try:
                flwr(environment, "supernode", "register", str(key), CONNECTION)
            except FedtailorError as error:
                if not any(word in str(error) for word in KNOWN):
                    raise
        return nodes_of(lambda *words: flwr(environment, *words))


def _wait_for(link: Link) -> None:
    """Until somebody listens there."""
    end = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(link.place, 5):
            return
        if time.monotonic() > end:
            raise FedtailorError(f"--superlink {link.address}: nobody listens there after {SECONDS:g} s")
        time.sleep(1)
