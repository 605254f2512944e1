"""``fedtailor profile``: what a network costs at every width."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from fedtailor.cli.output import JsonOption, console, print_json


def profile(
    model: Annotated[
        str, typer.Argument(help="A network's name, or your own as my_package.my_module:build.")
    ],
    fleet: Annotated[
        str, typer.Option(help="Whose tiers to show, e.g. uniform-5 or a1-b1-c1-d1-e1.")
    ] = "uniform-5",
    input_shape: Annotated[
        str, typer.Option("--input", help="Shape of one example, e.g. 3x32x32.")
    ] = "1x28x28",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show parameters, multiply-accumulates and bytes of a network for every tier of a fleet."""
    rows = _rows(model, fleet, input_shape, classes)
    if as_json:
        print_json(rows)
        return
    from fedtailor.report.tables import short

    table = Table(title=f"{model}, input {input_shape}, {classes} classes", title_justify="left")
    for column in ("tier", "width", "parameters", "MACs", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = (row["tier"], row["width"], f"{row['params']:,}", short(row["macs"]), f"{row['bytes']:,}")
        table.add_row(*cells)
    console.print(table)


def _rows(model: str, fleet: str, input_shape: str, classes: int) -> list[dict[str, Any]]:
    import torch

    from fedtailor.elastic import elastic
    from fedtailor.elastic.budget import fit
    from fedtailor.errors import FedtailorError, require
    from fedtailor.fleet import fleet_by_name
    from fedtailor.models import build_model

    try:
        shape = tuple(int(part) for part in input_shape.split("x"))
    except ValueError:
        raise FedtailorError(
            f"--input {input_shape!r}: expected whole numbers such as 3x32x32 or 80"
        ) from None
    require(classes >= 1, "--classes", classes, "at least 1")
    tiers = fleet_by_name(fleet).tiers
    network = build_model(model, input_shape=shape, num_classes=classes)
    text = len(shape) == 1 and any(isinstance(layer, torch.nn.Embedding) for layer in network.modules())
    inputs = torch.zeros((2, *shape), dtype=torch.long if text else torch.float32)
    cuttable = elastic(network, (inputs, torch.zeros(2, dtype=torch.long)))
    rows = []
    for tier in tiers:
        cut = fit(cuttable, tier.budget)
        cost = cuttable.cost(cut)
        rows.append(
            {
                "tier": tier.name,
                "width": cut.tag,
                "params": cost.params,
                "macs": cost.macs,
                "bytes": cost.bytes,
            }
        )
    return rows
