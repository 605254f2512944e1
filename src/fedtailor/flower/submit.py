"""From this machine to a SuperLink: a configuration is sent as an app, and its server is listened to until the end."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedtailor.errors import FedtailorError, visible
from fedtailor.flower.app_folder import write_app
from fedtailor.flower.local import CONNECTION, Link, installed

STARTED = re.compile(r"started run (\d+)")
RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")  # the first one is the cause of those that follow
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
REACH_SECONDS = 10.0
SAYS = ("waiting ", "round ", "error: ", "finished: ")  # how lines of our own server begin


def submit(
    config: str, folder: Path, link: Link, on_line: Callable[[str], None], *, resume: bool = False
) -> None:
    """Run a configuration on a SuperLink's nodes; ``folder`` is where its server writes, on the SuperLink's machine;
    ``resume`` goes on with the run that lies there.

    ``on_line`` is told what the server says. Ctrl-C stops the run; the rounds that had ended are saved.
    """
    program = installed("flwr")
    with tempfile.TemporaryDirectory() as place:
        write_app(Path(place) / "fedtailor-run", config, str(folder), resume)
        environment = link.home(Path(place) / "home")
        command = [str(program), "run", str(Path(place) / "fedtailor-run"), CONNECTION, "--stream"]
        number, cause, lines, said = "", "", list[str](), list[str]()
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            stdin=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for raw in process.stdout:
                    line = visible(COLOURS.sub("", raw).rstrip())
                    number = found[1] if (found := STARTED.search(line)) else number
                    lines = [*lines[-30:], line]
                    cause = cause or (line if RAISED.match(line) else "")
                    if line.startswith(SAYS):
                        said.append(line)
                        on_line(line)
            except KeyboardInterrupt:
                process.terminate()
                if number:
                    stop = [str(program), "stop", number, CONNECTION]
                    try:
                        subprocess.run(stop, env=environment, capture_output=True, timeout=60, check=False)
                    except subprocess.TimeoutExpired:
                        on_line(f"error: the SuperLink was asked to stop run {number} and has not answered")
                raise
        if not number:
            raise FedtailorError(
                f"the SuperLink at {link.address} took no run: {obstacle(link) or _last(lines)}"
            )
        if not any(line.startswith("finished: ") for line in said):
            told = next((line for line in reversed(said) if line.startswith("error: ")), "")
            raise FedtailorError(
                told.removeprefix("error: ")
                or f"the run ended on the SuperLink: {cause[:600] or _last(lines)}"
            )


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


def _last(lines: list[str]) -> str:
    told = [line.strip(" │╭╰─╮╯") for line in lines if line.strip(" │╭╰─╮╯")]
    return " ".join(told[-6:])[-600:] or "it said nothing"
