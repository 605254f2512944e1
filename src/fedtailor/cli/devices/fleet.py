"""``fedtailor fleet show``: who is given what, how long a round takes whom, and who is left out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.charts.terminal import Titled, Words, plain_table
from fedtailor.cli.output import JsonOption, SetOption, console, load_torch, notice, print_json

if TYPE_CHECKING:
    from fedtailor.server.clock.overview import TierView
    from fedtailor.server.setup import Setup

app = typer.Typer(no_args_is_help=True, help="Fleets: who is given what, and how long it takes whom.")

LONGEST_BAR = 6  # characters
WIDE = 100  # columns of a terminal that has room for more


@app.callback()
def fleets() -> None:
    """Fleets: who is given what, and how long it takes whom."""


@app.command("show")
def show(
    config: Annotated[
        Path, typer.Argument(help="The TOML file of a run: its network, data, method and fleet.")
    ],
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the tiers of a run's fleet before anything is trained.

    Another fleet for the same run: --set fleet.devices=my-devices.csv --set fleet.deadline=60s
    """
    load_torch()
    from fedtailor.config import load_config
    from fedtailor.run.setup import prepare_config
    from fedtailor.server.clock.overview import overview

    skipping = [*(overrides or []), 'fleet.too_small="skip"']
    setup = prepare_config(load_config(config, skipping, on_notice=notice))
    views = overview(setup)
    if as_json:
        print_json([_as_data(setup, view) for view in views])
        return
    console.print(_table(setup, config.name, [view for view in views if view.cut is not None]))
    for view in views:
        if view.reason:
            clients = f"{view.clients} client{'' if view.clients == 1 else 's'}"
            console.print(Words(f"left out: {view.name} ({clients}): {view.reason}"))


def _table(setup: Setup, name: str, views: list[TierView]) -> Titled:
    from fedtailor.report.amounts import duration, energy, short

    timed = any(view.way is not None for view in views)
    table = plain_table()
    table.add_column("tier", no_wrap=True)
    table.add_column("clients", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    times = ("down", "train", "up", "in all", *(("energy", "there") if console.width >= WIDE else ()))
    for column in ("width", "MACs", *(times if timed else ())):
        table.add_column(column, justify="right", no_wrap=True)
    most = max(view.clients for view in views)
    for view in views:
        assert view.cut is not None
        bar = "█" * max(1 if view.clients else 0, round(LONGEST_BAR * view.clients / max(1, most)))
        macs, width = short(setup.model.cost(view.cut).macs), f"{float(view.cut.width or 1):.3g}"
        if view.cut.depth is not None:
            width += f" x {float(view.cut.depth):.3g}"
        cells = [view.name, f"{view.clients:,}", bar, width, macs]
        if view.way is not None:
            way = (view.way.down, view.way.compute, view.way.up, view.way.seconds)
            cells += [*map(duration, way), energy(view.way.joules), f"{100 * view.availability:.0f} %"]
        table.add_row(*cells[: 5 + len(times)])
    return Titled(
        f"{name}: {setup.data.num_clients:,} clients, {setup.method.name}", table, _caption(setup, timed)
    )


def _caption(setup: Setup, timed: bool) -> str:
    from fedtailor.report.amounts import duration
    from fedtailor.server.clock.equipping import typical

    if not timed or setup.fleet.equipment is None:
        return ""
    deadline = setup.fleet.equipment.deadline
    until = "" if deadline == float("inf") else f"; the deadline is {duration(deadline)}"
    return (
        f"Simulated times of one task of a client with {typical(setup.data)} examples on the weakest device of "
        f"its tier{until}."
    )


def _as_data(setup: Setup, view: TierView) -> dict[str, Any]:
    found: dict[str, Any] = {"tier": view.name, "clients": view.clients}
    if view.cut is None:
        return {**found, "reason": view.reason}
    cost = setup.model.cost(view.cut)
    found |= {"width": view.cut.tag, "params": cost.params, "macs": cost.macs, "bytes": cost.bytes}
    if view.way is not None:
        found |= {
            "down": view.way.down, "train": view.way.compute, "up": view.way.up, "seconds": view.way.seconds,
            "joules": view.way.joules, "availability": view.availability,
        }  # fmt: skip
    return found
