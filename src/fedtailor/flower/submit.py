"""From this machine to a SuperLink: a configuration is sent as an app, and its server is listened to until the end."""

from __future__ import annotations

import queue
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedtailor.errors import FedtailorError, visible
from fedtailor.flower.app_folder import write_app
from fedtailor.flower.link import CONNECTION, Link, flwr, installed, obstacle, status_of

STARTED = re.compile(r"started run (\d+)")
RAISED = re.compile(r"([A-Za-z_][\w.]*(Error|Exception)|Exception): ")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SAYS = ("waiting ", "round ", "error: ", "finished: ")  # how lines of our own server begin
SILENCE_SECONDS = 120.0  # after which the SuperLink is asked whether the run goes on
MOST_UNANSWERED = 3  # questions in a row
MOST_PENDING = 15  # the same, of a run whose server has not begun: half an hour
NOT_BEGUN = ("pending", "starting")
TOO_SLOW = "Flower gives a process 30 s to start and then tries again, so a machine that is too busy never gets there"
OnLine = Callable[[str], None]


class NotBegunError(FedtailorError):
    """A run that the SuperLink has taken and does not start."""


@dataclass
class Heard:
    """What Flower's command has said of a run."""

    number: str = ""  # of the run; none as long as it has not been taken
    cause: str = ""  # the first error: those that follow come from it
    said: list[str] = field(default_factory=list)  # by our own server
    lines: list[str] = field(default_factory=list)  # by others: the last ones

    def take(self, raw: str) -> str:
        """A further line; it is returned if it is for people."""
        line = visible(COLOURS.sub("", raw).rstrip())
        self.number = found[1] if (found := STARTED.search(line)) else self.number
        self.cause = self.cause or (line if RAISED.match(line) else "")
        if not line.startswith(SAYS):
            self.lines = [*self.lines[-30:], line]
            return ""
        self.said.append(line)
        return line

    def check(self, link: Link) -> None:
        """Refuse a run that has not come to its end."""
        if not self.number:
            told = obstacle(link) or self._last()
            raise FedtailorError(f"the SuperLink at {link.address} took no run: {told}")
        if not any(line.startswith("finished: ") for line in self.said):
            told = next((line for line in reversed(self.said) if line.startswith("error: ")), "")
            raise FedtailorError(
                told.removeprefix("error: ")
                or f"the run ended on the SuperLink: {self.cause[:600] or self._last()}"
            )

    def _last(self) -> str:
        told = [line.strip(" │╭╰─╮╯") for line in self.lines if line.strip(" │╭╰─╮╯")]
        return " ".join(told[-6:])[-600:] or "it said nothing"


def submit(config: str, folder: Path, link: Link, on_line: OnLine, *, resume: bool = False) -> None:
    """Run a configuration on a SuperLink's nodes; ``folder`` is where its server writes, on the SuperLink's machine;
    ``resume`` goes on with the run that lies there.

    ``on_line`` is told what the server says. Ctrl-C stops the run; the rounds that had ended are saved.
    """
    program = str(installed("flwr"))
    with tempfile.TemporaryDirectory() as place:
        write_app(Path(place) / "fedtailor-run", config, str(folder), resume)
        environment = link.home(Path(place) / "home")
        command = [program, "run", str(Path(place) / "fedtailor-run"), CONNECTION, "--stream"]
        heard, silence = Heard(), Silence(link, environment, on_line)
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            encoding="utf-8", errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for raw in _as_they_come(process.stdout):
                    silence.check(raw is None, heard.number)
                    if raw is not None and (line := heard.take(raw)):
                        on_line(line)
            except KeyboardInterrupt:
                process.terminate()
                if heard.number:
                    _stop(program, heard.number, environment, on_line)
                raise
            except NotBegunError:
                process.kill()
                _stop(program, heard.number, environment, on_line)
                raise
            except FedtailorError:
                process.kill()
                raise
        heard.check(link)


def _as_they_come(lines: Iterable[str]) -> Iterator[str | None]:
    """Lines until there are no more; None whenever there has been none for some time."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = found.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


class Silence:
    """Ends a wait for nothing: Flower's command listens for good, also where a cut network has lost the other side."""

    def __init__(self, link: Link, environment: dict[str, str], on_line: OnLine) -> None:
        self.link, self.environment, self.on_line = link, environment, on_line
        self.unanswered, self.pending, self.ended = 0, 0, False

    def check(self, silent: bool, run: str) -> None:
        """Where nothing was heard, ask how the run is doing; refuse one that nobody knows of, or that has ended."""
        if not silent:
            self.unanswered, self.pending, self.ended = 0, 0, False
            return
        try:
            status = self._status(run)
        except FedtailorError as error:
            self.unanswered += 1
            if self.unanswered >= MOST_UNANSWERED:
                raise FedtailorError(
                    f"the SuperLink at {self.link.address} has not answered {self.unanswered} times in a row: "
                    f"{str(error).rstrip('.')}. The run may go on there; if not, fedtailor resume goes on with it"
                ) from error
            return
        if self.ended:
            raise FedtailorError(
                f"run {run} has ended on the SuperLink ({status}) while it could not be heard"
            )
        if status in NOT_BEGUN:
            self._not_begun(run, status)
        # What it said last may be on its way.
        self.unanswered, self.ended = 0, status.startswith("finished")

    def _not_begun(self, run: str, status: str) -> None:
        self.pending += 1
        if self.pending >= MOST_PENDING:
            minutes = SILENCE_SECONDS * self.pending / 60
            raise NotBegunError(
                f"the SuperLink at {self.link.address} has not started the server of run {run} for {minutes:g} minutes "
                f"({status}), and was asked to stop it: {TOO_SLOW}. Its log says what holds it up"
            )
        self.on_line(f"waiting for the SuperLink to start the run's server ({status}): {TOO_SLOW}")

    def _status(self, run: str) -> str:
        if not run:
            raise FedtailorError("it has not said yet that it takes the run")
        return status_of(lambda *words: flwr(self.environment, *words), run)


def _stop(program: str, number: str, environment: dict[str, str], on_line: OnLine) -> None:
    stop = [program, "stop", number, CONNECTION]
    try:
        subprocess.run(stop, env=environment, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        on_line(f"error: the SuperLink was asked to stop run {number} and has not answered")
