"""What the commands share: consoles, JSON, errors, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedtailor.errors import LockedError
from fedtailor.record import RoundRecord, headline
from fedtailor.report.amounts import size
from fedtailor.steps import TRAINING, heard_by

console = Console(highlight=False)  # results, on standard output
messages = Console(stderr=True, highlight=False)  # progress and errors, on standard error

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a config key, e.g. --set data.alpha=0.1. Repeatable."
    ),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also log to tensorboard, wandb or mlflow. Repeatable."),
]


def fail(text: str) -> None:
    """Show an error as one sentence."""
    messages.print("[bold red]error:[/] ", end="")
    messages.print(text, markup=False, soft_wrap=True)


def notice(text: str) -> None:
    """Say what the user should know and need not act on."""
    messages.print(f"note: {text}", markup=False, soft_wrap=not messages.is_terminal)


def print_json(value: Any) -> None:
    """Print a value as JSON, without colour or wrapping."""
    typer.echo(json.dumps(value, indent=2))


def load_torch() -> None:
    """Load PyTorch, which takes seconds, and say so on a terminal meanwhile."""
    if "torch" in sys.modules or not messages.is_terminal:
        import torch
    else:
        with messages.status("loading PyTorch"):
            import torch  # noqa: F401


def refuse_if_in_use(folder: Path) -> None:
    """Exit at once, before PyTorch is loaded, if a run writes into this folder at the moment."""
    from fedtailor.storage.files import in_use

    if in_use(folder):
        raise LockedError(f"{folder} is in use by another run: nothing was changed")


@contextmanager
def stoppable(folder: Path, command: str) -> Iterator[None]:
    """Ctrl-C is no error: say what is saved and how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        text = str(stop) or f"stopped; the rounds that had ended are saved in {folder}"
        if not folder.exists():
            text = "stopped before the first round"
        messages.print(f"{text[0].upper()}{text[1:]}. Go on with:  {command}", markup=False, soft_wrap=True)
        raise typer.Exit(getattr(stop, "exit_code", 130)) from None


def progress_bars() -> Progress | None:
    """Bars for rounds, on a terminal only."""
    if not messages.is_terminal:
        return None
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    return Progress(*columns, console=messages, expand=True)


class RoundProgress:
    """A progress bar on a terminal; a plain line per evaluation elsewhere. Several may share their ``bars``.

    Entered, it also shows what is being done: without a bar, a line for each step until training begins.

    ``earlier`` are the records of a run that goes on: what they sent counts, unless their rounds are done again.
    """

    def __init__(
        self, title: str, rounds: int, bars: Progress | None = None, earlier: Sequence[RoundRecord] = ()
    ) -> None:
        self.title, self.rounds, self.last, self.stage = title, rounds, "", ""
        self.doing, self.begun, self.hearing = "starting", False, heard_by(self.step)
        self.sent = {record.round: record.spent.bytes for record in earlier}
        self.bar = bars or progress_bars()
        self.task = TaskID(0)
        if self.bar is not None:
            self.task = self.bar.add_task(title, total=rounds, state=self.doing)

    def __enter__(self) -> RoundProgress:
        if self.bar is not None:
            self.bar.start()
        self.hearing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.hearing.__exit__(kind, error, traceback)
        if self.bar is not None:
            self.bar.stop()

    def remove(self) -> None:
        """Take this bar away from those that it shares the screen with."""
        if self.bar is not None:
            self.bar.remove_task(self.task)

    def step(self, text: str) -> None:
        """Show what is being done from now on."""
        self.begun = self.begun or text == TRAINING
        self.doing = "" if text == TRAINING else text
        if self.bar is not None:
            self.bar.update(self.task, state=self._state())
        elif not self.begun:
            messages.print(f"{self.title}  {text}", markup=False, soft_wrap=True)

    def _state(self) -> str:
        """What stands beside the bar: what is being done, and what was last known."""
        sent = size(sum(self.sent.values())) if self.sent and not self.doing else ""
        return "  ".join(part for part in (self.doing, self.stage, self.last, sent) if part)

    def __call__(self, record: RoundRecord) -> None:
        """Show one finished round."""
        self.sent[record.round] = record.spent.bytes
        sent = size(sum(self.sent.values()))
        asked, merged = record.cohort.asked, record.cohort.merged
        if merged < asked / 2:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in record.cohort.refused.items())
            text = f"round {record.round}: only {merged} of {asked} clients gave an update ({reasons})"
            messages.print(text, markup=False, soft_wrap=True)
        self._show_stage(record)
        if record.tiers:
            metric, names = headline(record.tiers), list(record.tiers)
            shown = dict.fromkeys((names[0], names[-1]))
            self.last = "  ".join(_tier(name, metric, record.tiers[name][metric]) for name in shown)
        if self.bar is not None:
            self.doing = ""
            self.bar.update(self.task, completed=record.round, state=self._state())
        elif record.tiers:
            line = f"{self.title}  round {record.round}/{self.rounds}  {self.last}  {sent}"
            messages.print(line, soft_wrap=True)

    def _show_stage(self, record: RoundRecord) -> None:
        """What a method of several stages says that it is at; without a bar, a line for each change."""
        said = record.method
        before, stage = self.stage, str(said.get("progress", said.get("stage", "")))
        self.stage = stage
        if stage != before and self.bar is None:
            messages.print(f"{self.title}  round {record.round}/{self.rounds}  {stage}", soft_wrap=True)


def _tier(name: str, metric: str, value: float) -> str:
    if metric == "accuracy":
        return f"tier {name}: {100 * value:.1f} %"
    shown = f"{100 * value:.1f} %" if metric.endswith("accuracy") else f"{value:.4g}"
    return f"tier {name}: {metric} {shown}"
