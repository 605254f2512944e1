"""What the commands share: consoles, JSON, errors; progress is that of any run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedtailor.errors import LockedError, visible
from fedtailor.progress import RoundProgress as RoundProgress
from fedtailor.progress import messages as messages
from fedtailor.progress import progress_bars as progress_bars
from fedtailor.report.targets import REACHED, USUAL_TARGET
from fedtailor.storage.rows import as_text

console = Console(highlight=False)  # results, on standard output

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a config key, e.g. --set data.alpha=0.1. Repeatable."
    ),
]
TargetOption = Annotated[
    float | None,
    typer.Option(
        "--target", help=f"The accuracy, in per cent, whose cost is shown. {REACHED} {USUAL_TARGET}"
    ),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also log to tensorboard, wandb or mlflow. Repeatable."),
]


def fail(text: str) -> None:
    """Show an error as one sentence."""
    messages.print("[bold red]error:[/] ", end="")
    messages.print(visible(text), markup=False, soft_wrap=True)


def notice(text: str) -> None:
    """Say what the user should know and need not act on."""
    messages.print(f"note: {visible(text)}", markup=False, soft_wrap=not messages.is_terminal)


def print_json(value: Any) -> None:
    """Print a value as JSON, without colour or wrapping; a number that is none is null."""
    typer.echo(as_text(value, 2))


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
        told = f"{text[0].upper()}{text[1:]}. Go on with:  {command}"
        if not folder.exists():
            told = "Stopped before the first round: nothing was written."
        messages.print(told, markup=False, soft_wrap=True)
        raise typer.Exit(getattr(stop, "exit_code", 130)) from None
