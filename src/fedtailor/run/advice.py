"""What a user should know of a set-up before it trains: a sentence for each surprise that can be told in advance."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.elasticity.cutting.selections import as_width
from fedtailor.fleet import Tier
from fedtailor.messages import Metrics
from fedtailor.objective import cross_entropy
from fedtailor.server.setup import Setup

HOPELESS = 100  # times the loss of a guess


def advice(setup: Setup) -> list[str]:
    """Who takes no part and why, and who is given less than it may have."""
    found = [_left_out(setup, tier) for tier in setup.fleet.left_out]
    found += [sentence for tier in setup.fleet.tiers if (sentence := _narrower(setup, tier))]
    return found


def _left_out(setup: Setup, tier: Tier) -> str:
    try:
        setup.method.cut_for(setup.start.state, tier.budget, setup.model)
    except TooSmallError as error:
        return f"tier {tier.name!r} takes no part: {error}"
    return f"tier {tier.name!r} takes no part: no piece of the model fits {tier.budget}"


def _narrower(setup: Setup, tier: Tier) -> str:
    """Where a method trains a list of widths alone, a tier between them is given the next smaller one."""
    trained = getattr(setup.method, "widths", None)
    if tier.budget.width is None or not isinstance(trained, tuple):
        return ""
    allowed = as_width(tier.budget.width)
    given = setup.method.cut_for(setup.start.state, tier.budget, setup.model).width
    if given is None or given >= allowed:
        return ""
    budgets = [each.budget.width for each in setup.fleet.tiers if each.budget.width is not None]
    own = ", ".join(
        f'"{width}"' if width.denominator > 1 else str(width) for width in sorted(map(as_width, budgets))
    )
    return (
        f"tier {tier.name!r} may have width {allowed} and is given {given}, because {setup.method.name} trains the "
        f"widths {', '.join(map(str, trained))}; method.widths = [{own}] trains the fleet's own"
    )


def afterthought(setup: Setup, tiers: Mapping[str, Metrics]) -> str:
    """What a user should know of a result that no rule refused: nothing where there is no doubt.

    Updates of numbers that are huge but finite are merged; what comes of them answers nothing.
    """
    classes, losses = setup.data.num_classes, [scores["loss"] for scores in tiers.values()]
    if setup.model.objective.loss is not cross_entropy or classes < 2 or not losses:
        return ""
    if min(losses) < HOPELESS * math.log(classes):
        return ""
    return (
        f"the loss of every tier is {min(losses):.3g} or more, where guessing has {math.log(classes):.2g}: "
        "training has blown up. Lower training.lr, or set training.clip_norm"
    )
