"""What is shown while a run goes on: a bar in a terminal or a notebook, a line per evaluation elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedtailor.errors import visible
from fedtailor.record import RoundRecord, headline
from fedtailor.report.amounts import size
from fedtailor.steps import TRAINING, heard_by

messages = Console(stderr=True, highlight=False)  # progress and errors, on standard error


def progress_bars() -> Progress | None:
    """Bars for rounds, on a terminal only."""
    if not messages.is_terminal:
        return None
    columns = (
        TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    return Progress(*columns, console=messages, expand=True)


def showing(
    title: str, rounds: int, wanted: bool | None, earlier: Sequence[RoundRecord] = ()
) -> AbstractContextManager[RoundProgress | None]:
    """Progress where someone looks (a terminal, a notebook) or where it is wanted; nothing elsewhere."""
    someone_looks = messages.is_terminal or messages.is_jupyter
    if wanted is False or (wanted is None and not someone_looks):
        return nullcontext()
    return RoundProgress(title, rounds, NotebookBars() if messages.is_jupyter else None, earlier)


class Bars(Protocol):
    """What draws bars: ``rich.progress.Progress`` in a terminal, ``NotebookBars`` in a notebook."""

    def add_task(self, description: str, *, total: float | None, **fields: Any) -> TaskID: ...
    def update(self, task_id: TaskID, *, completed: float | None = None, **fields: Any) -> None: ...
    def remove_task(self, task_id: TaskID) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class NotebookBars:
    """Bars in the output of a notebook's cell, drawn anew in place."""

    def __init__(self) -> None:
        self._rows: dict[TaskID, dict[str, Any]] = {}
        self._handle: Any = None

    def add_task(self, description: str, *, total: float | None, **fields: Any) -> TaskID:
        """A new bar."""
        number = TaskID(len(self._rows))
        self._rows[number] = {"title": description, "total": total, "completed": 0, "state": "", **fields}
        return number

    def update(self, task_id: TaskID, *, completed: float | None = None, **fields: Any) -> None:
        """A bar has grown, or says something else."""
        self._rows[task_id].update({} if completed is None else {"completed": completed}, **fields)
        self._draw()

    def remove_task(self, task_id: TaskID) -> None:
        """Take a bar away."""
        self._rows.pop(task_id)
        self._draw()

    def start(self) -> None:
        """Show the bars for the first time."""
        from IPython.display import HTML, display

        self._handle = display(HTML(self.html()), display_id=True)

    def stop(self) -> None:
        """The bars stay as they are."""

    def _draw(self) -> None:
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self.html()))

    def html(self) -> str:
        """All bars."""
        return "".join(
            f"<div><b>{html.escape(row['title'])}</b> "
            f'<progress value="{row["completed"]}" max="{row["total"]}"></progress> '
            f"{row['completed']}/{row['total']} {html.escape(row['state'])}</div>"
            for row in self._rows.values()
        )


class RoundProgress:
    """A progress bar on a terminal; a plain line per evaluation elsewhere. Several may share their ``bars``.

    Entered, it also shows what is being done: without a bar, a line for each step until training begins.

    ``earlier`` are the records of a run that goes on: what they sent counts, unless their rounds are done again.
    """

    def __init__(
        self, title: str, rounds: int, bars: Bars | None = None, earlier: Sequence[RoundRecord] = ()
    ) -> None:
        self.title, self.rounds, self.last, self.stage = title, rounds, "", ""
        self.doing, self.begun, self.hearing = "starting", False, heard_by(self.step)
        self.sent = {record.round: record.spent.bytes for record in earlier}
        self.bar: Bars | None = bars or progress_bars()
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

    def count(self, earlier: Sequence[RoundRecord]) -> None:
        """These rounds were done before: what they sent counts."""
        self.sent |= {record.round: record.spent.bytes for record in earlier}

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
        sent = self._sent() if self.sent and not self.doing else ""
        return visible("  ".join(part for part in (self.doing, self.stage, self.last, sent) if part))

    def _sent(self) -> str:
        return f"{size(sum(self.sent.values()))} sent"

    def __call__(self, record: RoundRecord) -> None:
        """Show one finished round."""
        self.sent[record.round] = record.spent.bytes
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
            line = f"{self.title}  round {record.round}/{self.rounds}  {self.last}  {self._sent()}"
            messages.print(visible(line), markup=False, soft_wrap=True)

    def _show_stage(self, record: RoundRecord) -> None:
        """What a method of several stages says that it is at; without a bar, a line for each change."""
        said = record.method
        before, stage = self.stage, str(said.get("progress", said.get("stage", "")))
        self.stage = stage
        if stage != before and self.bar is None:
            line = f"{self.title}  round {record.round}/{self.rounds}  {stage}"
            messages.print(visible(line), markup=False, soft_wrap=True)


def _tier(name: str, metric: str, value: float) -> str:
    if metric == "accuracy":
        return f"tier {name}: {100 * value:.1f} %"
    shown = f"{100 * value:.1f} %" if metric.endswith("accuracy") else f"{value:.4g}"
    return f"tier {name}: {metric} {shown}"
