"""Clipped sums over clients and what becomes of them: the mathematics of a private round, tensor by tensor.

    D_i = what client i sent - what it was sent, over all its floating-point tensors        (0 where it sent nothing)
    v_i = w + min(1, C / |D_i|) D_i                                                          what it sends, clipped
    w'  = (sum_i v_i + (E - n) w + noise) / E  =  w + (sum_i (v_i - w) + noise) / E          coordinate by coordinate

n clients sent a coordinate, and E is how many were expected, which is public: n is not, and a quotient by it could
change by any amount with one client. Written as on the left, the sum is the plain merge's own where n = E and nothing
is clipped, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import is_tagged
from fedtailor.elasticity.cutting.patch import WHOLE, Patch, Where, gather, scatter
from fedtailor.elasticity.model import ElasticModel
from fedtailor.merging.holders import add_at
from fedtailor.messages import ServerState
from fedtailor.privacy.terms import Terms

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """What every client of a tier is sent and sends back in a round."""

    cut: Cut
    names: frozenset[str]


@dataclass(frozen=True)
class Ground:
    """Of one tensor: for every coordinate its ring (-1: nobody holds it) and how many clients are expected."""

    ring: Tensor  # int64
    expected: Tensor  # float64


def grounds(
    weights: Weights, pieces: Sequence[Piece], terms: Terms, model: ElasticModel
) -> dict[str, Ground]:
    """The ground of every tensor that some tier holds a part of."""
    found: dict[str, Ground] = {}
    tables = [model.table(piece.cut) for piece in pieces]
    for name in sorted({name for piece in pieces for name in piece.names}):
        value = weights[name]
        ring = torch.full(value.shape, -1, dtype=torch.int64, device=value.device)
        expected = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
        for tier in reversed(range(len(pieces))):  # the smallest tier that holds a coordinate comes last
            if name in pieces[tier].names and terms.counts[tier]:
                where = whole_or(tables[tier].get(name), value)
                add_at(expected, where, terms.expected(tier))
                scatter(ring, where, ring.new_tensor(tier))
        found[name] = Ground(ring, expected)
    return found


def whole_or(where: Where | None, value: Tensor) -> Where:
    """An index, also of tensors that no cut divides."""
    return (WHOLE,) * value.dim() if where is None else where


def sent_to(state: ServerState, patch: Patch, model: ElasticModel) -> dict[str, Tensor]:
    """What a client that sends back a patch started from."""
    own = [name for name in patch.values if not is_tagged(name)]
    before = model.cut(state.weights, patch.cut, frozenset(own)).values
    return {name: before[name] if name in before else state.weights[name] for name in patch.values}


def clipped(
    state: ServerState, patch: Patch, grounds: Mapping[str, Ground], terms: Terms, model: ElasticModel
) -> dict[str, Tensor]:
    """The floating-point values of a patch in float64, its difference no longer than the clip allows."""
    before, table = sent_to(state, patch, model), model.table(patch.cut)
    values = {name: value for name, value in patch.values.items() if value.is_floating_point()}
    steps = {name: value.double() - before[name].double() for name, value in values.items()}
    rings = {
        name: gather(grounds[name].ring, whole_or(table.get(name), grounds[name].ring)) for name in values
    }
    factors = _factors(steps, rings, terms)
    found = {}
    for name, value in values.items():
        factor = factors.to(value.device)[rings[name]]
        found[name] = torch.where(factor == 1, value.double(), before[name].double() + factor * steps[name])
    return found


def _factors(steps: Mapping[str, Tensor], rings: Mapping[str, Tensor], terms: Terms) -> Tensor:
    """min(1, C / |D|) for each ring: of the whole difference, or of the part in that ring."""
    squares = torch.zeros(len(terms.tiers), dtype=torch.float64)
    for name, step in steps.items():
        of_ring = torch.bincount(
            rings[name].reshape(-1), weights=step.reshape(-1).square(), minlength=len(terms.tiers)
        )
        squares += of_ring.cpu()
    norms = squares.sum().sqrt().expand(len(terms.tiers)) if terms.whole else squares.sqrt()
    clips = torch.tensor(terms.clips, dtype=torch.float64)
    return torch.where(norms > clips, clips / torch.where(norms > 0, norms, 1.0), 1.0)


@dataclass(frozen=True)
class Sums:
    """Of one tensor: the sum of what clients sent, and how many sent each coordinate; both in float64."""

    total: Tensor
    count: Tensor

    @classmethod
    def nobody(cls, like: Tensor) -> Sums:
        """Before anyone sends: minus zero is the neutral element of addition, as in the plain merge."""
        total = torch.full(like.shape, -0.0, dtype=torch.float64, device=like.device)
        return cls(total, torch.zeros_like(total))

    def take(self, where: Where, values: Tensor) -> None:
        """Add one client's values."""
        add_at(self.total, where, values)
        add_at(self.count, where, 1.0)

    def filled(self, old: Tensor, ground: Ground) -> Tensor:
        """The sum as if those who are missing had sent back what they were sent, and those too many nothing new."""
        missing = ground.expected - self.count
        return torch.where(missing == 0, self.total, self.total + missing * old.double())


def released(old: Tensor, filled: Tensor, ground: Ground, noise: Tensor | None) -> Tensor:
    """The tensor after a round; what no tier holds keeps its bits."""
    noisy = filled if noise is None else filled + noise
    held = ground.ring >= 0
    mean = noisy / torch.where(held, ground.expected, 1.0)
    return torch.where(held, mean.to(old.dtype), old)
