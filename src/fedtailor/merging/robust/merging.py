"""The robust merge: who is heard, and what becomes of every coordinate.

    answers → class_sizes → thin classes?  → lengths → bounds → shrinking; believed        (guard)
            → krum, tier by tier                                                            (of krum)
            → block by block: the rule where enough hold a coordinate, the guarded mean where too few do

Running statistics and counts are no steps: they are merged by value, coordinate by coordinate, by the rule; ``clip``,
which has no length to measure there, takes the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.elasticity.model import ElasticModel
from fedtailor.merging.robust.answers import Answers, Block
from fedtailor.merging.robust.columns import between, median, weighted_mean
from fedtailor.merging.robust.guard import (
    LEAST_HOLDERS,
    believed,
    bounds,
    class_sizes,
    lengths,
    shrinking,
)
from fedtailor.merging.robust.krum import chosen_of_tiers
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.messages import Update


@dataclass(frozen=True)
class Hearing:
    """What is known of the clients of a round before anything is merged."""

    settings: MergeSettings
    answers: Answers
    thin: Tensor  # (classes,): whether too few hold it
    holds: Tensor  # (clients, classes): who holds which
    factors: Tensor  # (clients, classes): what steps are shrunk by
    believed: Sequence[bool]
    chosen: Sequence[bool | None]  # by Krum; None where the tier is too small, or the rule another

    @property
    def verdict(self) -> dict[str, list[int]]:
        """Whose step was shortened and who was not heard, somewhere, for the record; nothing where nobody was."""
        everywhere = self.settings.rule == "krum"
        doubtful = self.holds & (self.thin | everywhere)  # (clients, classes)
        short = (self.factors < 1) & (self.holds if self.settings.rule == "clip" else doubtful)
        found: dict[str, list[int]] = {"clipped": [], "unheard": []}
        for number, update in enumerate(self.answers.updates):
            taken = self.chosen[number]
            if taken is None and bool(short[number].any()):
                found["clipped"].append(update.client)
            if taken is False or (
                taken is None and not self.believed[number] and bool(doubtful[number].any())
            ):
                found["unheard"].append(update.client)
        return {key: clients for key, clients in found.items() if clients}


def heard(
    settings: MergeSettings,
    weights: Mapping[str, Tensor],
    updates: Sequence[Update],
    model: ElasticModel,
    weight: Callable[[Update], float],
) -> Hearing:
    """Measure the updates of a round against each other."""
    answers = Answers.of(weights, updates, model, weight)
    count, kinds = len(answers.updates), answers.number_of_classes
    sizes, holders = class_sizes(answers), [answers.holders(each) for each in range(kinds)]
    thin = torch.tensor([0 < number < LEAST_HOLDERS for number in holders]) & (sizes > 0)
    is_krum = settings.rule == "krum"
    chosen = chosen_of_tiers(answers, settings.attackers) if is_krum else [None] * count
    doubtful = bool(thin.any()) or (is_krum and None in chosen)
    factors, holds = (
        torch.ones((count, kinds), dtype=torch.float64),
        torch.ones((count, kinds), dtype=torch.bool),
    )
    if settings.rule == "clip" or doubtful:
        found = lengths(answers, sizes)
        factors, holds = shrinking(found, bounds(found, holders, settings.bound)), ~found.isnan()
    fine = believed(answers, thin) if doubtful else [True] * count
    return Hearing(settings, answers, thin, holds, factors, fine, chosen)


def each_merged(hearing: Hearing) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name after name the merged tensor, and which of its coordinates somebody was heard about."""
    answers = hearing.answers
    for name in answers.names:
        old = answers.base.get(name)
        first = next(each.patch.values[name] for each in answers.updates if name in each.patch.values)
        found = [_merged(hearing, block) for block in answers.blocks(name)]
        merged, sent = (torch.cat(each) for each in zip(*found, strict=True))
        merged = merged.to(first.dtype) if first.is_floating_point() else merged.round().to(first.dtype)
        shape = first.shape if old is None else old.shape
        merged, sent = merged.view(shape), sent.view(shape)
        yield name, (merged if old is None else torch.where(sent, merged, old)), sent


def _merged(hearing: Hearing, block: Block) -> tuple[Tensor, Tensor]:
    """One block: the merged values in float64, and which coordinates have one."""
    answers, settings = hearing.answers, hearing.settings
    weights, step = [answers.weights[number] for number in block.clients], answers.is_step(block.name)
    of_clients = settings.rule == "krum" or (settings.rule == "clip" and step)
    enough = block.held.sum(0) >= LEAST_HOLDERS
    robust = None
    if not of_clients and bool(enough.any()):
        left = between(block.values, block.held, settings.trim) if settings.rule == "trimmed-mean" else None
        robust = (
            median(block.values, block.held) if left is None else weighted_mean(block.values, left, weights)
        )
        if bool(enough.all()):
            return robust, enough
    values, counted = _guarded(hearing, block, step)
    guarded, sent = weighted_mean(values, counted, weights), counted.any(0)
    return (guarded, sent) if robust is None else (torch.where(enough, robust, guarded), enough | sent)


def _guarded(hearing: Hearing, block: Block, step: bool) -> tuple[Tensor, Tensor]:
    """What a mean may be taken of: steps of at most the allowed length, of those who are believed where it matters."""
    clients, is_krum = block.clients, hearing.settings.rule == "krum"
    device = block.values.device
    taken = [
        fine if (choice := hearing.chosen[number]) is None else choice
        for number, fine in ((number, hearing.believed[number]) for number in clients)
    ]
    counted = block.held
    if not all(taken):
        thin = block.held.sum(0) < LEAST_HOLDERS
        everyone = torch.tensor(taken, device=device)[:, None]
        counted = counted & (everyone if is_krum else everyone | ~thin)
        if block.base is None:  # a coordinate that was never there has no value to keep
            counted = torch.where(counted.any(0), counted, block.held)
    if not step:
        return block.values, counted
    picked = torch.tensor([hearing.chosen[number] is not None for number in clients])
    factors = torch.where(picked[:, None], 1.0, hearing.factors[clients]).to(device)
    if not bool((factors < 1).any()):
        return block.values, counted
    assert block.base is not None
    of_each = factors[:, block.classes]
    short = block.base.double() + of_each * block.steps
    return torch.where(of_each < 1, short, block.values.double()), counted
