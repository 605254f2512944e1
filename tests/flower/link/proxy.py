"""A TCP proxy on loopback that counts what passes: bytes on the wire, as they are, TLS and all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Counted:
    """Where the proxy listens, and the bytes that have passed it."""

    port: int
    up: int = 0  # from a node to the SuperLink
    down: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def seen(self) -> tuple[int, int]:
        """Bytes up and down until now."""
        with self.lock:
            return self.up, self.down

    def add(self, up: int = 0, down: int = 0) -> None:
        """Count what has passed."""
        with self.lock:
            self.up, self.down = self.up + up, self.down + down


@contextmanager
def counting_proxy(target: int) -> Iterator[Counted]:
    """Everything that goes to the proxy goes on to ``target`` on this machine."""
    listening = socket.create_server(("127.0.0.1", 0))
    counted = Counted(listening.getsockname()[1])
    opened: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):  # closed: the block has ended
            while True:
                near, _ = listening.accept()
                far = socket.create_connection(("127.0.0.1", target))
                opened.extend((near, far))
                for source, sink, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=pass_on, args=(source, sink, way), daemon=True).start()

    def pass_on(source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):  # either side hung up
            while data := source.recv(2**16):
                counted.add(**{way: len(data)})
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield counted
    finally:
        for each in (listening, *opened):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
