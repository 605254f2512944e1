"""A process that does one run after another: commands come in on standard input, one JSON line each.

It dies with whoever started it: when standard input ends, so does the process, in the middle of a round if need be.
What a run had saved by then is not lost.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from fedtailor.errors import FedtailorError


def main() -> None:
    """Answer every command with one line: what became of the run."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a user's code prints must not look like an answer
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    while True:
        try:
            _answer(commands.get(), answers)
        except KeyboardInterrupt:
            return


def _listen(commands: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os._exit(1)


def _answer(command: dict[str, Any], answers: TextIO) -> None:
    try:
        do_run(command["config"], Path(command["folder"]))
        answer: dict[str, object] = {"state": "finished"}
    except KeyboardInterrupt as stop:
        answer = {"state": "stopped", "text": str(stop)}
    except FedtailorError as error:
        answer = {"state": "failed", "text": str(error), "exit_code": error.exit_code}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def do_run(toml: str, folder: Path) -> None:
    """Start the run of this configuration, or go on with what is there."""
    import tomllib

    from fedtailor.config import make_config
    from fedtailor.run.interface import resume, run_config

    if folder.exists():
        resume(folder)
    else:
        run_config(make_config(tomllib.loads(toml)), folder, on_notice=_told_already)


def _told_already(_notice: str) -> None:
    """Whoever began the comparison has read the data once and said what there is to say."""


if __name__ == "__main__":
    main()
