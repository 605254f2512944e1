"""``fedtailor models``: which networks there are, and what they cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.output import JsonOption, console, load_torch, print_json
from fedtailor.errors import FedtailorError, require

USUAL = ("1x28x28", "80")  # images, and texts of so many characters


def models(
    input_shape: Annotated[
        str | None,
        typer.Option(
            "--input", help="Shape of one example, e.g. 3x32x32; default: 1x28x28 for images, 80 for texts."
        ),
    ] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """List the networks: parameters, and multiply-accumulates of one example, at full width."""
    require(classes >= 1, "--classes", classes, "at least 1")
    load_torch()
    from fedtailor.models import model_names
    from fedtailor.report.amounts import short

    shapes = USUAL if input_shape is None else (input_shape,)
    found = (_row(name, shapes, classes) for name in model_names())
    rows = [row for row in found if row is not None]
    if not rows:
        raise FedtailorError(f"--input {input_shape!r}: no network takes such examples; try 3x32x32 or 80")
    if as_json:
        print_json(rows)
        return
    table = plain_table()
    table.add_column("name", no_wrap=True)
    for column in ("input", "parameters", "MACs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what it is")
    for row in rows:
        summary = Text(row["summary"].rstrip("."))
        table.add_row(row["name"], row["input"], f"{row['params']:,}", short(row["macs"]), summary)
    more = "fedtailor profile NAME shows what every tier of a fleet is given of it"
    console.print(Titled(f"Networks, {classes} classes", table, more))


def _row(name: str, shapes: tuple[str, ...], classes: int) -> dict[str, Any] | None:
    """The network on examples of the first of these shapes that it takes; None if it takes none of them."""
    import torch

    from fedtailor.cli.profile import example_of, parsed_shape
    from fedtailor.elasticity.costing.cost import forward_macs
    from fedtailor.models import build_model
    from fedtailor.models.registry import summary_of

    for text in shapes:
        shape = parsed_shape(text)
        try:
            with torch.device("meta"):  # sizes alone are asked for
                network = build_model(name, input_shape=shape, num_classes=classes).eval()
        except FedtailorError:
            continue
        parameters = sum(parameter.numel() for parameter in network.parameters())
        macs = forward_macs(network, (example_of(network, shape),))
        return {
            "name": name, "input": text, "params": parameters, "macs": macs,
            "summary": summary_of(name),
        }  # fmt: skip
    return None
