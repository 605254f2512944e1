"""How far the steps of local training themselves follow the trajectory: an estimate that needs no pass of its own.

Every local step has the gradient of the filters that it drew. Their products with the global update, and their squares,
summed over a round's steps, are all that the closed form of ``alignment.expected_slope`` asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import gather
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.methods.flado.alignment import expected_slope, held_units, unit_sums


class Following:
    """Sums over the steps of one client's round; ``toward`` is the global update, at any length."""

    def __init__(self, toward: Weights, model: ElasticModel) -> None:
        self.toward, self.model = toward, model
        self.along = np.zeros(
            model.units.total + 1
        )  # <delta, u> of each unit's filter, and of all other numbers
        self.squares = np.zeros(model.units.total + 1)
        self.draws = np.zeros(model.units.total)
        self.steps = 0

    def watched(self, weights: Weights, cut: Cut) -> Weights:
        """The same weights; what a step does to them is added to the sums when their gradients are known."""
        self.steps += 1
        self.draws += held_units(self.model, cut)
        table = self.model.table(cut)
        return {
            name: _Watched.apply(value, self, name, gather(self.toward[name], table[name]), cut)  # type: ignore[no-untyped-call]
            if name in self.toward and value.requires_grad
            else value
            for name, value in weights.items()
        }

    def add(self, name: str, gradient: Tensor, toward: Tensor, cut: Cut) -> None:
        """A tensor's gradient: the step goes the other way."""
        self.along -= unit_sums({name: gradient * toward}, cut, self.model)
        self.squares += unit_sums({name: gradient * gradient}, cut, self.model)

    def slope(self, probabilities: Vector, power: int) -> Vector:
        """dC/dp; 0 for units that no step drew."""
        drawn = np.maximum(self.draws, 1)
        along, squares = (
            np.append(sums[:-1] / drawn, sums[-1] / max(1, self.steps)) for sums in (self.along, self.squares)
        )
        length = float(sum(float(part.double().square().sum()) for part in self.toward.values()) ** 0.5)
        slope = expected_slope(probabilities, along, squares, power) / max(length, 1e-30)
        return np.where(self.draws > 0, slope, 0.0)

    @property
    def cosine(self) -> float:
        """Of the update and the steps, the lengths of single steps taken together."""
        length = float(sum(float(part.double().square().sum()) for part in self.toward.values()) ** 0.5)
        scale = length * float(self.squares.sum() * max(1, self.steps)) ** 0.5
        return float(self.along.sum()) / scale if scale > 0 else 0.0


class _Watched(torch.autograd.Function):
    """A tensor as it is, whose gradient is looked at."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, following: Following, name: str, toward: Tensor, cut: Cut) -> Tensor:
        ctx.following, ctx.name, ctx.toward, ctx.cut = following, name, toward, cut
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        ctx.following.add(ctx.name, gradient, ctx.toward, ctx.cut)
        return gradient, None, None, None, None
