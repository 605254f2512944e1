"""From ``auto`` to a method: what is seen of model and fleet, what the rules make of it, and how it is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from fedtailor.config import RunConfig, build_method
from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import Fleet, Tier
from fedtailor.method import Method
from fedtailor.methods.auto import Auto
from fedtailor.run.auto.rules import Seen, decide
from fedtailor.server.setup import Chosen, Setup

NOT_OF_WIDTH = {"density", "depth"}  # limits that no cut of channels keeps to


def seen(model: ElasticModel, fleet: Fleet, method: Method) -> Seen:
    """What the rules look at; of tiers that no piece fits, which are refused or left out later, that there are some."""
    limits = frozenset(name for tier in fleet.tiers for name in tier.budget.limits)
    shares: dict[Fraction, Fraction] = {}
    all_fit = True
    for tier in () if limits & NOT_OF_WIDTH else fleet.tiers:
        width = _width(model, tier, method)
        all_fit = all_fit and width is not None
        if width is not None:
            shares[width] = shares.get(width, Fraction(0)) + tier.share
    spread = fleet.macs_range is None and shares  # with a range, tiers are points of evaluation
    return Seen(
        statistics=bool(model.statistics),
        limits=limits,
        widths=tuple(sorted(shares)),
        smallest_share=shares[min(shares)] / sum(shares.values()) if spread else Fraction(0),
        all_fit=all_fit,
    )


def _width(model: ElasticModel, tier: Tier, method: Method) -> Fraction | None:
    try:
        return model.fit(tier.budget, method.grid, workload=method.workload).width
    except TooSmallError:
        return None


def taken(method: Method, model: ElasticModel, fleet: Callable[[], Fleet]) -> tuple[Method, Chosen | None]:
    """The method itself; in the place of ``auto``, for which alone the fleet is built, what the rules take, and why."""
    if not isinstance(method, Auto):
        return method, None
    table, why = decide(seen(model, fleet(), method))
    table = {**table, **({"align": method.grid} if method.grid > 1 else {})}
    made = build_method(
        table, vars(method.local), method.local.rounds, method.server_said, vars(method.merging)
    )
    return made, Chosen(table, why)


def written(config: RunConfig, setup: Setup) -> RunConfig:
    """A config that names what ``auto`` took, with the training that it was taken with: what is resumed is settled."""
    if setup.chosen is None:
        return config
    local = {
        key: value for key, value in vars(setup.method.local).items() if key != "rounds" and value is not None
    }
    return replace(config, method=dict(setup.chosen.method), training=local)
