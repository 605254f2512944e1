"""``fedtailor new-app`` and ``fedtailor flower-up``: a Flower app to start from, and a SuperLink to try it on."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import JsonOption, console, messages, print_json
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

    @property
    def options(self) -> str:
        """The same again, as it is typed."""
        words = ["--engine flower", f"--superlink {self.superlink}"]
        words += [f"--root-certificates {self.root_certificates}"] if self.root_certificates else []
        return " ".join([*words, *(["--insecure"] if self.insecure else [])])


def run_there(config: str, folder: Path, where: Where, *, resume: bool = False) -> None:
    """Send a configuration to a SuperLink, and show what its server says."""
    from fedtailor.flower.link import Link
    from fedtailor.flower.submit import submit

    if where.superlink is None:
        raise FedtailorError(
            "--engine flower: expected --superlink HOST:PORT; `fedtailor flower-up` starts one here"
        )
    link = Link(where.superlink, where.root_certificates, where.insecure)
    messages.print(f"Sending the run to the SuperLink at {link.address} ...", markup=False)

    def say(line: str) -> None:
        messages.print(line, markup=False, soft_wrap=True)

    _interrupt_by_any_signal()
    submit(config, folder.absolute(), link, say, resume=resume)
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


def flower_keys(
    folder: Annotated[Path, typer.Argument(help="Where certificates and keys are written.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or an address of the SuperLink's machine, as nodes call it. Repeatable."),
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="A SuperNode that gets a key. Repeatable.")] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Write certificates for a SuperLink and keys for SuperNodes."""
    try:
        from fedtailor.flower.keys import write_keys

        public = write_keys(folder, host or [], node or [], days)
    except ImportError as error:
        raise FedtailorError(f'keys need the extra: pip install "fedtailor[flower]" ({error})') from error
    if host:
        console.print(f"{folder}/ca.crt: for everybody who talks to the SuperLink", markup=False)
        console.print(f"{folder}/server.crt, {folder}/server.key: stay with the SuperLink", markup=False)
    for each in public:
        key = each.with_suffix(".key")
        console.print(f"{key}: for this node alone;  {each}: register it at the SuperLink", markup=False)


def flower_link(
    keys: Annotated[Path, typer.Argument(help="The folder that flower-keys wrote.")],
    host: Annotated[str, typer.Option(help="On which address to listen; 0.0.0.0: on all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The one port that nodes and commands need.")] = 8000,
    database: Annotated[Path, typer.Option(help="Where it keeps what it knows.")] = Path("superlink.db"),
) -> None:
    """Run a SuperLink over TLS that lets in registered SuperNodes alone, until Ctrl-C."""
    from fedtailor.flower.node import run_link

    run_link(keys, host, port, database)


def flower_nodes(
    superlink: Annotated[str, typer.Option(help="The SuperLink's address, host:port.")],
    root_certificates: Annotated[Path, typer.Option(help="The authority's certificate, ca.crt.")],
    add: Annotated[
        list[Path] | None, typer.Option(help="The public key of a SuperNode to let in. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which SuperNodes a SuperLink lets in and which are connected; register keys of new ones."""
    from fedtailor.charts.terminal import Titled, plain_table
    from fedtailor.flower.link import Link
    from fedtailor.flower.register import register

    found = register(Link(superlink, root_certificates), add or [])
    if as_json:
        print_json(found)
        return
    table = plain_table()
    for column in ("node", "status", "since"):
        table.add_column(column, no_wrap=True)
    for node in found:
        table.add_row(node["node-id"], node["status"], node["online-at"])
    console.print(Titled(f"SuperNodes of {superlink}", table))


def flower_node(
    superlink: Annotated[str, typer.Option(help="The SuperLink's address, host:port.")],
    root_certificates: Annotated[Path, typer.Option(help="The authority's certificate, ca.crt.")],
    key: Annotated[Path, typer.Option(help="This node's own key, which is registered at the SuperLink.")],
    device: Annotated[
        Path, typer.Option(help="What the device says of itself: a TOML file, as bench-device writes it.")
    ],
    port: Annotated[
        int, typer.Option(help="A free port of this machine, for the node's own processes.")
    ] = 8001,
) -> None:
    """Run a SuperNode for a device: with the file that it says of itself, started again whenever it is lost."""
    from fedtailor.flower.link import Link
    from fedtailor.flower.node import run_node

    run_node(Link(superlink, root_certificates), key, device, port)


def flower_up(
    nodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes.")] = 2,
    folder: Annotated[Path, typer.Option(help="Where keys, logs and what clients keep are written.")] = Path(
        "flower-local"
    ),
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Nodes that Ray simulates, on this machine or a cluster.")
    ] = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, over TLS with fresh keys, until Ctrl-C."""
    from fedtailor.flower.local import local_link, simulated_link

    parts = [
        {"partition-id": n, "num-partitions": nodes, "state": str(folder.absolute() / f"client{n}")}
        for n in range(nodes)
    ]
    _interrupt_by_any_signal()
    messages.print(f"Starting a SuperLink and {nodes} SuperNodes ...", markup=False)
    with simulated_link(folder, nodes) if simulation else local_link(folder, parts) as link:
        there = "will be simulated" if simulation else "are connected"
        console.print(
            f"SuperLink at {link.address}, {nodes} SuperNodes {there}; logs in {folder}/", markup=False
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


def _interrupt_by_any_signal() -> None:
    """What batch systems send is as good as Ctrl-C; also where a shell lets those in the background ignore that."""
    for number in SIGNALS:
        signal.signal(number, _as_interrupt)


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
