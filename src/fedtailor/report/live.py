"""A page that follows a run, served on this machine only and made from the run folder alone.

The run knows nothing of it: a finished or crashed run is shown in the same way. Its address carries a token, because
other users of the machine reach the same ports.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedtailor.charts.panel import Panel, ReportedRun
from fedtailor.errors import FedtailorError
from fedtailor.report.folders import read_runs
from fedtailor.report.page import chart_data, columns, page, require_charts
from fedtailor.report.panels import devices
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.report.panels.devices import connected_in_words, devices_panel
from fedtailor.storage.rows import as_text
from fedtailor.storage.run_folder import RunFolder

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 32  # at once: a browser opens six
IDLE_SECONDS = 30  # after which one that says nothing is closed
NO_TOKEN = b"This page opens at the whole address that fedtailor has printed, with the token in it."
WAITING = "waiting for the first round"


def look(path: Path) -> tuple[str, list[Panel]]:
    """How the run stands, in words, and its panels."""
    try:
        runs = read_runs([path])
    except FedtailorError:
        runs = []  # not begun
    if not runs:
        try:
            there = RunFolder(path).devices()
        except FedtailorError as error:
            return str(error), []
        words = f"{WAITING}; {connected_in_words(there)}" if there else WAITING
        return words, [devices_panel(there)] if there else []
    return "; ".join(map(_state, runs[:4])) + ("; ..." if len(runs) > 4 else ""), all_panels(runs)


def _state(run: ReportedRun) -> str:
    rounds = run.config.get("rounds")
    done = f"round {run.records[-1].round}" + (f" of {rounds}" if rounds else "")
    there = f", {connected_in_words(run.devices)}" if run.devices and run.state == "running" else ""
    return f"{run.variant}, seed {run.seed}: {run.state}, {done}{there}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Two addresses: the page, and its data."""
        # A page of another site that had its name point here would send its own name.
        host = self.headers.get("Host", "").rpartition(":")[0]
        start = f"/{self.server.token}/"
        known = hmac.compare_digest(self.path[: len(start)].encode(), start.encode())
        name = self.path[len(start) :]
        if host not in (LOOPBACK, "localhost"):
            self._send(403, "text/plain", b"only for this machine")
        elif not known:
            self._send(403, "text/plain", NO_TOKEN)
        elif name == "":
            state, panels = look(self.server.path)
            title = f"{self.server.path.resolve().name} (live)"
            text = page(title, panels or [Panel("waiting", "Nothing yet", state)], live=True)
            self._send(200, "text/html; charset=utf-8", text.encode())
        elif name == "data.json":
            self._send_data()
        else:
            self._send(404, "text/plain", b"not here")

    def _send_data(self) -> None:
        state, panels = look(self.server.path)
        tables = [each.tables for each in panels if each.key == devices.KEY]
        shown = [[caption, columns(rows), rows] for caption, rows in (tables[0] if tables else ())]
        body = as_text({"state": state, "charts": chart_data(panels), "devices": shown}).encode()
        tag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, "application/json", b"", tag)
        else:
            self._send(200, "application/json", body, tag)

    def _send(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers["Referrer-Policy"] = "no-referrer"  # a link on the page must not hand the token on
        for name, value in {**headers, **({"ETag": tag} if tag else {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nobody's business."""


class Server(ThreadingHTTPServer):
    """Bound to this machine; no other can reach it."""

    daemon_threads = True

    def __init__(self, path: Path, port: int) -> None:
        require_charts()
        self.path = path
        self.token = secrets.token_urlsafe(16)
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise FedtailorError(f"--port {port}: {error.strerror or error}; 0 takes any free one") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; who comes when all are taken is turned away."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, which gives its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up or falls silent is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where to look."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"


@contextmanager
def watching(path: Path, port: int = 0) -> Iterator[Server]:
    """Serve the page in the background for as long as the block runs."""
    server = Server(path, port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
