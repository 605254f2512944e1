"""What a user should know of a set-up before it trains: a sentence for each surprise that can be told in advance."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.fleet import Tier
from fedtailor.messages import Metrics
from fedtailor.methods.nested import has_fleet_widths
from fedtailor.objective import TASKS, cross_entropy
from fedtailor.server.setup import Setup

HOPELESS = 100  # times the loss of a guess
HIGH_FOR_ADAM = 0.05


def advice(setup: Setup) -> list[str]:
    """What ``auto`` took, odd outputs and rates, who takes no part and why, who is given less than it may have."""
    found = [setup.chosen.why] if setup.chosen else []
    found += [setup.aligned.in_words] if setup.aligned else []
    found += _about_outputs(setup) + _about_rates(setup)
    found += [_left_out(setup, tier) for tier in setup.fleet.left_out]
    return found + _narrower(setup)


def _about_outputs(setup: Setup) -> list[str]:
    model, classes = setup.model, setup.data.num_classes
    output = model.output
    if (
        model.objective.loss is not cross_entropy
        or not isinstance(output, Tensor)
        or output.dim() != 2
        or not classes
    ):
        return []
    found = []
    if output.shape[-1] > classes:
        found.append(f"the network has {output.shape[-1]} outputs, and {setup.data.name} {classes} classes")
    sums = output.detach().double().sum(dim=-1)
    if (
        output.shape[-1] > 1
        and bool((output >= 0).all())
        and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    ):
        found.append(
            "the network's outputs are shares that add up to 1: a softmax at its end? The loss has one of its own, "
            "so such a network learns slowly; leave it out"
        )
    return found


def _about_rates(setup: Setup) -> list[str]:
    local = setup.method.local
    if local.optimiser not in ("adam", "adamw") or local.lr < HIGH_FOR_ADAM:
        return []
    return [
        f"training.lr = {local.lr} is high for {local.optimiser}, which moves every weight by about that much in each "
        "step; 0.001 is usual"
    ]


def _left_out(setup: Setup, tier: Tier) -> str:
    try:
        setup.method.cut_for(setup.start.state, tier.budget, setup.model)
    except TooSmallError as error:
        return f"tier {tier.name!r} takes no part: {error}"
    return f"tier {tier.name!r} takes no part: no piece of the model fits {tier.budget}"


def _narrower(setup: Setup) -> list[str]:
    # Not at the top: every client on Flower would wait for it.
    from fedtailor.report.fairness import narrower

    budgets = {tier.name: tier.budget.width for tier in setup.fleet.tiers}
    tiers = {name: width for name, width in budgets.items() if width is not None}
    method = setup.method
    if has_fleet_widths(method, setup.fleet.budgets, setup.model):
        return []
    sentence = narrower(method.name, "method.widths", getattr(method, "widths", None), tiers)
    return [sentence] if sentence else []


def afterthought(setup: Setup, tiers: Mapping[str, Metrics]) -> str:
    """What a user should know of a result that no rule refused: nothing where there is no doubt.

    Updates of numbers that are huge but finite are merged; what comes of them answers nothing.
    """
    if doubt := _no_better_than_guessing(setup, tiers):
        return doubt
    classes, losses = setup.data.num_classes, [scores["loss"] for scores in tiers.values()]
    if setup.model.objective.loss is not cross_entropy or classes < 2 or not losses:
        return ""
    if min(losses) < HOPELESS * math.log(classes):
        return ""
    return (
        f"the loss of every tier is {min(losses):.3g} or more, where guessing has {math.log(classes):.2g}: "
        "training has blown up. Lower training.lr, or set training.clip_norm"
    )


def _no_better_than_guessing(setup: Setup, tiers: Mapping[str, Metrics]) -> str:
    """Of a regression or of labels: whether the same answer to everything would have done as well."""
    task, targets = setup.model.learning_task, setup.data.train.targets
    if not tiers or len(targets) == 0:
        return ""
    if task is TASKS["regression"] and "absolute error" in setup.model.objective.metrics:
        middle = targets.double().median(dim=0).values
        guess = float((setup.data.test.targets.double() - middle).abs().mean())
        best = min(scores["absolute error"] for scores in tiers.values())
        answer, better = "the middle of all targets", best < guess
    elif task is TASKS["multi-label"] and "label accuracy" in setup.model.objective.metrics:
        usual = targets.double().mean(dim=0) > 0.5
        guess = float((setup.data.test.targets.bool() == usual).double().mean())
        best = max(scores["label accuracy"] for scores in tiers.values())
        answer, better = "every label's usual value", best > guess
    else:
        return ""
    if better:
        return ""
    return (
        f"no tier is better than {answer} as the answer to everything ({guess:.3g}; the best has {best:.3g}): nothing "
        "was learnt yet. Train longer, try another training.lr, and scale targets that are far from 1"
    )
