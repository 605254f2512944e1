"""Krum inside a tier (Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017), its form with many winners.

    score(i) = sum of the n - f - 2 smallest |step_i - step_j|^2 over the others j;    the n - f lowest are merged

Scores are compared only among clients that hold the same piece: between pieces of other sizes, the smallest would
always win. A tier needs n >= 2 f + 3 clients, f of which may be bad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.merging.robust.answers import Answers


def chosen_of_tiers(answers: Answers, share: float) -> list[bool | None]:
    """For each client whether its tier's Krum takes it; None where the tier is too small to tell."""
    members: dict[int, list[int]] = {}
    for number, piece in enumerate(answers.pieces):
        members.setdefault(piece, []).append(number)
    chosen: list[bool | None] = [None] * len(answers.updates)
    tiers = [each for each in members.values() if len(each) >= 2 * bad_of(len(each), share) + 3]
    for tier, distances in zip(tiers, _distances(answers, tiers), strict=True):
        taken = krum(distances, bad_of(len(tier), share))
        for place, number in enumerate(tier):
            chosen[number] = place in taken
    return chosen


def bad_of(clients: int, share: float) -> int:
    """How many of a tier's clients are assumed to be bad."""
    return max(1, int(clients * share))


def krum(distances: Tensor, bad: int) -> set[int]:
    """Who is taken: (n, n) squared distances → the n - bad that lie closest to the others; of equals the first."""
    count = len(distances)
    near = distances.sort(dim=1).values[:, 1 : count - bad - 1]  # the first is its own
    scores = near.sum(1).tolist()
    return set(sorted(range(count), key=lambda each: (scores[each], each))[: count - bad])


def _distances(answers: Answers, tiers: list[list[int]]) -> list[Tensor]:
    """The squared distances of every tier's clients from each other."""
    products = [torch.zeros((len(tier), len(tier)), dtype=torch.float64) for tier in tiers]
    for name in filter(answers.is_step, answers.names):
        for block in answers.blocks(name) if tiers else ():
            place = {number: row for row, number in enumerate(block.clients)}
            steps = block.steps
            for tier, product in zip(tiers, products, strict=True):
                rows = [place[number] for number in tier if number in place]
                if rows:  # the same piece: all of them have the tensor, or none
                    own = steps[rows]
                    product += (own @ own.T).cpu()
    squares = [product.diagonal() for product in products]
    return [
        (own[:, None] + own[None, :] - 2 * product).clamp(min=0)
        for own, product in zip(squares, products, strict=True)
    ]
