"""Which SuperNodes a SuperLink lets in, and which of them are connected."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedtailor.errors import FedtailorError
from fedtailor.flower.local import CONNECTION, flwr, nodes_of
from fedtailor.flower.submit import Link

KNOWN = ("already", "in use")  # how Flower says that a key is registered


def register(link: Link, keys: Sequence[Path]) -> list[dict[str, str]]:
    """Register public keys, of which the SuperLink may know some; all nodes that it knows then."""
    for key in keys:
        if not key.is_file():
            raise FedtailorError(f"--add {key}: no such file")
    with tempfile.TemporaryDirectory() as place:
        environment = link.home(Path(place))
        for key in keys:
            try:
                flwr(environment, "supernode", "register", str(key), CONNECTION)
            except FedtailorError as error:
                if not any(word in str(error) for word in KNOWN):
                    raise
        return nodes_of(lambda *words: flwr(environment, *words))
