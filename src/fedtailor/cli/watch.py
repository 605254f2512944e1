"""``fedtailor watch``: follow a run in the browser, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import load_torch, messages
from fedtailor.errors import FedtailorError

PortOption = Annotated[int, typer.Option(help="The port on this machine; 0 takes any free one.")]


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison, e.g. runs/first.")],
    port: PortOption = 0,
) -> None:
    """Show a run that goes on, has ended or has crashed as a page that only this machine can open."""
    if not folder.is_dir():
        raise FedtailorError(f"{folder}: no such folder; expected that of a run, see `fedtailor runs`")
    load_torch()
    from fedtailor.report.live import Server

    server = Server(folder, port)
    messages.print(f"Watching {folder} at {server.url}  (Ctrl-C to end)", markup=False, soft_wrap=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        server.server_close()
