"""``fedtailor profile``: what a network costs at every width, and the piece that fits a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.grouping import grouped
from fedtailor.cli.output import JsonOption, SetOption, console, load_torch, notice, print_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fedtailor.elasticity.cutting.cut import Cut
    from fedtailor.elasticity.model import ElasticModel

    Pieces = Callable[[], dict[str, Cut]]  # tier -> what it is given


@dataclass(frozen=True)
class Network:
    """Which network, on which examples."""

    model: Annotated[
        str,
        typer.Argument(
            help="A network's name, your own as my_package.my_module:build, or the TOML file of a run."
        ),
    ]
    input_shape: Annotated[str, typer.Option("--input", help="Shape of one example, e.g. 3x32x32.")] = (
        "1x28x28"
    )
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10

    @property
    def is_run(self) -> bool:
        """Whether it is that of a run's file, which says all the rest."""
        return self.model.endswith(".toml")


@grouped
def profile(
    network: Network,
    fleet: Annotated[
        str, typer.Option(help="Whose tiers to show, e.g. uniform-5 or a1-b1-c1-d1-e1.")
    ] = "uniform-5",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Limits to fit instead, e.g. macs=5M,memory=20MB (also params, bytes, step_time, width)."
        ),
    ] = None,
    per_group: Annotated[
        bool, typer.Option("--per-group", help="Let every channel group have a width of its own.")
    ] = False,
    timed: Annotated[bool, typer.Option("--timed", help="Also measure training steps (slow).")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what shrinks together, what cannot, and why.")
    ] = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a network costs: for every tier of a fleet, or at every width against a budget."""
    load_torch()
    from fedtailor.elasticity.costing.budget import Budget
    from fedtailor.report.profile import profile as cost_profile
    from fedtailor.report.profile import profile_view

    limits = Budget.parse(budget) if budget is not None else None
    title, traced, pieces = (
        _of_run(network.model, overrides or []) if network.is_run else _of_network(network, fleet)
    )
    if explain:
        if as_json:
            print_json({"groups": traced.groups.counts, "fixed": traced.groups.fixed})
        else:
            console.print(traced.explain(), markup=False, soft_wrap=True)
        return
    if limits is not None or timed:
        result = cost_profile(traced, limits, family="per_group" if per_group else "uniform", timed=timed)
        print_json(result.as_data()) if as_json else console.print(profile_view(result, title))
        if result.refusal:
            raise typer.Exit(2)
        return
    rows = [_row(traced, tier, cut) for tier, cut in pieces().items()]
    print_json(rows) if as_json else console.print(_table(title, rows))


def _table(title: str, rows: list[dict[str, Any]]) -> Titled:
    from fedtailor.report.amounts import short

    table = plain_table()
    for column in ("tier", "width", "parameters", "MACs", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = (row["tier"], row["width"], f"{row['params']:,}", short(row["macs"]), f"{row['bytes']:,}")
        table.add_row(*cells)
    return Titled(title, table)


def _of_network(network: Network, fleet: str) -> tuple[str, ElasticModel, Pieces]:
    """A network by name, and what each tier of a fleet could run of it."""
    from fedtailor.fleet import fleet_by_name

    tiers = fleet_by_name(fleet).tiers
    traced = traced_network(network)
    title = f"{network.model}, input {network.input_shape}, {network.classes} classes"
    return title, traced, lambda: {tier.name: traced.fit(tier.budget) for tier in tiers}


def _of_run(config: str, overrides: list[str]) -> tuple[str, ElasticModel, Pieces]:
    """The network of a config, and what its method gives each tier; nothing is trained or written.

    Tiers that nothing fits are left out with a notice, whatever the run itself would do with them.
    """
    from fedtailor.config import load_config
    from fedtailor.run.setup import prepare_config

    skipping = [*overrides, 'fleet.too_small="skip"']
    setup = prepare_config(load_config(config, skipping, on_notice=notice), notice)
    given, state, model = setup.method.cut_for, setup.start.state, setup.model
    title = f"{config} ({setup.method.name})"
    return title, model, lambda: {tier.name: given(state, tier.budget, model) for tier in setup.fleet.tiers}


def _row(network: ElasticModel, tier: str, cut: Cut) -> dict[str, Any]:
    cost = network.cost(cut)
    return {"tier": tier, "width": cut.tag, "params": cost.params, "macs": cost.macs, "bytes": cost.bytes}


def traced_network(network: Network) -> ElasticModel:
    """A network by name, for examples of the shape that was asked for."""
    import torch

    from fedtailor.elasticity.front_door import elastic
    from fedtailor.errors import require
    from fedtailor.models import build_model

    shape, classes = parsed_shape(network.input_shape), network.classes
    require(classes >= 1, "--classes", classes, "at least 1")
    module = build_model(network.model, input_shape=shape, num_classes=classes)
    return elastic(module, (example_of(module, shape), torch.zeros(2, dtype=torch.long)))


def parsed_shape(text: str) -> tuple[int, ...]:
    """``3x32x32`` as sizes."""
    from fedtailor.errors import FedtailorError

    try:
        return tuple(int(part) for part in text.split("x"))
    except ValueError:
        raise FedtailorError(f"--input {text!r}: expected whole numbers such as 3x32x32 or 80") from None


def example_of(network: Module, shape: tuple[int, ...]) -> Tensor:
    """Two examples of a shape, all zeros: numbers of characters for a network that looks them up."""
    import torch

    text = len(shape) == 1 and any(isinstance(layer, torch.nn.Embedding) for layer in network.modules())
    return torch.zeros((2, *shape), dtype=torch.long if text else torch.float32)
