"""``fedtailor check``: what a deployed file does on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor.cli.output import JsonOption, console, load_torch, print_json

if TYPE_CHECKING:
    from fedtailor.deploying.checking import Checked


def check(
    file: Annotated[Path, typer.Argument(help="A file of a bundle, e.g. runs/first/deploy/0.25.onnx.")],
    data: Annotated[
        str | None, typer.Option(help="Test examples, by name or path as in a config: measure accuracy too.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For weights alone: what builds the network at full size, e.g. my_net.py:Net."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How many calls are timed.")] = 100,
    threads: Annotated[int, typer.Option(help="Threads that an answer may use.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run a deployed file here: latency, memory, accuracy, and whether its manifest is right."""
    load_torch()
    import torch

    from fedtailor.deploying.checking import check as run_file
    from fedtailor.errors import require

    require(threads >= 1, "--threads", threads, "at least 1")
    torch.set_num_threads(threads)
    found = run_file(file, data, model, repeats=repeats)
    print_json(found.as_data()) if as_json else _show(found)
    if found.differences:
        raise typer.Exit(1)


def _show(found: Checked) -> None:
    from fedtailor.report.amounts import size

    known = "no manifest beside it names it" if found.expected is None else "sha256 as in the manifest"
    lines = [
        f"{found.file}: {found.form}, {size(found.size)}, {known}",
        f"latency    median {found.median_ms:.3g} ms, p95 {found.p95_ms:.3g} ms ({found.repeats} calls, one example)",
        f"memory     {'not told by this system' if found.memory is None else size(found.memory)} above the process",
    ]
    if found.score is not None:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.score.metrics.items())
        lines.append(f"score      {shown} ({found.score.examples:,} examples)")
    lines += [f"differs    {each}" for each in found.differences]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
