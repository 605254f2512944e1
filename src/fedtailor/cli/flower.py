"""``fedtailor new-app`` and ``fedtailor flower-up``: a Flower app to start from, and a SuperLink to try it on."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import console, messages
from fedtailor.errors import FedtailorError, unknown
from fedtailor.storage.interrupt import SIGNALS


@dataclass(frozen=True)
class Where:
    """Where clients run: on this machine, or on the nodes of a Flower SuperLink."""

    engine: Annotated[
        str | None, typer.Option(help="flower: on the nodes of a SuperLink instead of this machine.")
    ] = None
    superlink: Annotated[str | None, typer.Option(help="The SuperLink's address, host:port.")] = None
    root_certificates: Annotated[
        Path | None,
        typer.Option(help="The certificate of the authority that the SuperLink's own is signed by."),
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS, on a network of your own.")] = (
        False
    )

    @property
    def on_flower(self) -> bool:
        """Whether to send the run to a SuperLink; half an answer is refused."""
        if self.engine not in (None, "flower"):
            raise unknown("engine (--engine)", self.engine, ["flower"])
        if self.engine is None and (self.superlink or self.root_certificates or self.insecure):
            raise FedtailorError("--superlink, --root-certificates and --insecure belong to --engine flower")
        return self.engine is not None


def run_there(config: str, folder: Path, where: Where) -> None:
    """Send a configuration to a SuperLink, and show what its server says."""
    from fedtailor.flower.submit import Link, submit

    if where.superlink is None:
        raise FedtailorError(
            "--engine flower: expected --superlink HOST:PORT; `fedtailor flower-up` starts one here"
        )
    link = Link(where.superlink, where.root_certificates, where.insecure)
    messages.print(f"Sending the run to the SuperLink at {link.address} ...", markup=False)
    submit(config, folder.absolute(), link, lambda line: messages.print(line, markup=False, soft_wrap=True))
    if folder.exists():
        console.print(f"Files: {folder}/  (fedtailor report {folder} shows them)", markup=False)
    else:
        console.print(f"Files: {folder.absolute()}/ on the machine of the SuperLink", markup=False)


def new_app(
    folder: Annotated[Path, typer.Argument(help="A new folder; its name is the app's.")],
    config: Annotated[
        Path | None, typer.Option(help="The TOML file of a run; without it, one to start from.")
    ] = None,
) -> None:
    """Write a Flower app: your model, your configuration, and the two parts that `flwr run` starts."""
    from fedtailor.flower.app_folder import write_app

    text = None
    if config is not None:
        from fedtailor.config import load_config, to_toml

        text = to_toml(load_config(config))
    write_app(folder, text)
    console.print(f"{folder}/  (pyproject.toml: the configuration; README.md: how it runs)", markup=False)


def flower_up(
    nodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes.")] = 2,
    folder: Annotated[Path, typer.Option(help="Where keys, logs and what clients keep are written.")] = Path(
        "flower-local"
    ),
) -> None:
    """Start a SuperLink and SuperNodes on this machine, over TLS with fresh keys, until Ctrl-C."""
    from fedtailor.flower.local import local_link

    parts = [
        {"partition-id": n, "num-partitions": nodes, "state": str(folder.absolute() / f"client{n}")}
        for n in range(nodes)
    ]
    for number in SIGNALS:  # also where a shell lets those in the background ignore them
        signal.signal(number, _as_interrupt)
    messages.print(f"Starting a SuperLink and {nodes} SuperNodes ...", markup=False)
    with local_link(folder, parts) as link:
        console.print(
            f"SuperLink at {link.address}, {nodes} SuperNodes are connected; logs in {folder}/", markup=False
        )
        console.print(
            f"fedtailor run CONFIG --engine flower --superlink {link.address} --root-certificates {folder}/ca.crt",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        console.print("Ctrl-C stops all of them.", markup=False)
        try:
            while True:
                time.sleep(1)
                dead = [name for name, process in link.processes.items() if process.poll() is not None]
                if dead:
                    messages.print(f"{dead[0]} has ended: see {folder}/{dead[0]}.log", markup=False)
                    raise typer.Exit(70)
        except KeyboardInterrupt:
            messages.print("Stopping ...", markup=False)


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
