"""Which channels help a client's steps to follow the global trajectory: a cosine, and its gradient per channel.

    c(b) = cos( J delta, J(-g(b)) )        delta = the global update, g(b) = gradient of the loss under the mask b

J is the transform that delta was sketched with: under another one the cosine would be noise. The sign matters too:
a client moves along -g. Three estimates of how c changes with the probability of each unit:

- ``hessian``: dc/db, straight through the draw of b. With v = dc/dg, dc/db = d/de grad_b loss(b, theta + e v) at e = 0,
  by a central difference: two more passes, and no second derivative of any layer is needed.
- ``score``: the mean over draws of (c(b) - mean of the other draws) (b - p) / (p (1 - p)); unbiased and noisy.
- ``surrogate``: g(b) is taken for b * g, so c follows from two sums per unit in closed form; no further pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import gather, scatter
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.layout import Layouts, laid_out
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.methods.flado.sketch import Transform, cosine

Loss = Callable[[Mapping[str, Tensor], Cut], Tensor]  # of weights at a cut
Draw = Callable[[int], Cut]

PASSES = {"hessian": 3, "score": 4, "surrogate": 1}  # forward and backward passes of one estimate
ESTIMATORS = tuple(PASSES)


def estimate_macs(how: str, forward: float, size: int) -> float:
    """Multiply-accumulates of one estimate: its passes, each as three forward ones, and its transforms of ``size``."""
    transforms = size * math.log2(size) * (4 if how == "score" else 2)
    return 3 * forward * PASSES[how] + transforms


@dataclass(frozen=True)
class Trajectory:
    """The global update as a client sees it: k numbers, and the transform that made them."""

    sketch: Tensor
    transform: Transform


def sketched(names: Sequence[str], values: Mapping[str, Tensor], rows: int, seed: int) -> Trajectory:
    """Sketch a vector that is spread over tensors."""
    parts = [values[name] for name in names]
    transform = Transform(sum(part.numel() for part in parts), rows, seed)
    return Trajectory(transform(parts), transform)


def trained_names(model: ElasticModel) -> list[str]:
    """The tensors whose movement is the trajectory, in an order that both sides know."""
    return [name for name in model.parameters if name in model.trainable]


@dataclass(frozen=True)
class Alignment:
    """One client's loss around its weights, compared with the global trajectory."""

    model: ElasticModel
    weights: Weights  # of the full model
    trajectory: Trajectory
    loss: Loss

    def estimate(
        self, how: str, probabilities: Vector, draw: Draw, whole: bool = False
    ) -> tuple[Vector, float]:
        """How c changes with every unit's probability, and c itself.

        Passes run on the drawn network, and units that it does not hold stay at zero. With ``whole`` they run on the
        full one under a mask, which says something about every unit and costs as much as a dense step.
        """
        if how == "score":
            return self.score([draw(number) for number in range(PASSES["score"])], probabilities)
        if how == "surrogate":
            return self.surrogate(Cut.everything() if whole else draw(0), probabilities)
        return self.hessian(draw(0), whole)

    def hessian(self, drawn: Cut, whole: bool = False) -> tuple[Vector, float]:
        """dc/db at the mask of a drawn network."""
        cut = Cut.everything() if whole else drawn
        weights, mask = self.at(cut), held_units(self.model, drawn)
        value, slope = self.compared(self.gradients(weights, cut, mask)[0], cut)
        steepness = _norm(slope.values())
        if steepness == 0:
            return np.zeros(self.model.units.total), value
        size = _norm(weights[name] for name in slope)
        step = torch.finfo(next(iter(slope.values())).dtype).eps ** (1 / 3) * size / steepness
        sides = []
        for sign in (1, -1):
            moved = {n: w + sign * step * slope[n] if n in slope else w for n, w in weights.items()}
            sides.append(self.gradients(moved, cut, mask)[1])
        return ((sides[0] - sides[1]) / (2 * step)).double().cpu().numpy(), value

    def score(self, cuts: Sequence[Cut], probabilities: Vector) -> tuple[Vector, float]:
        """The score-function estimate, each draw measured against the mean of the others."""
        values = np.array([self.cosine_at(cut) for cut in cuts])
        others = (values.sum() - values) / (len(values) - 1)
        variance = np.clip(probabilities * (1 - probabilities), 1e-6, None)
        masks = np.stack([held_units(self.model, cut) for cut in cuts])
        weights = np.where(probabilities < 1, (masks - probabilities) / variance, 0)
        return ((values - others)[:, None] * weights).mean(axis=0), float(values.mean())

    def cosine_at(self, cut: Cut) -> float:
        """c for one drawn network."""
        return self.compared(self.gradients(self.at(cut), cut)[0], cut)[0]

    def surrogate(self, cut: Cut, probabilities: Vector) -> tuple[Vector, float]:
        """c(p) = A / sqrt(S) with A = sum of p_n <delta_n, -g_n> and S = sum of p_n |g_n|^2, up to a constant."""
        gradient, _ = self.gradients(self.at(cut), cut)
        back = self._split(self.trajectory.transform.adjoint(self.trajectory.sketch), cut)
        along = self._sums({n: -back[n] * g for n, g in gradient.items()}, cut)
        squares = self._sums({n: g * g for n, g in gradient.items()}, cut)
        own, rest = slice(None, -1), -1  # numbers that belong to no unit are always there
        held = held_units(self.model, cut)
        aligned = float((probabilities * held) @ along[own] + along[rest])
        square = float((probabilities * held) @ squares[own] + squares[rest])
        value, _ = self.compared(gradient, cut)
        if square <= 0:
            return np.zeros(self.model.units.total), value
        slope = along[own] / square**0.5 - aligned * squares[own] / (2 * square**1.5)
        return slope / max(float(self.trajectory.sketch.norm()), 1e-30) * held, value

    def compared(self, gradient: Weights, cut: Cut) -> tuple[float, Weights]:
        """c, and its derivative with respect to the gradient at a cut."""
        transform, target = self.trajectory.transform, self.trajectory.sketch
        ours = transform(self._placed(gradient, cut)).neg_()
        target = target.to(ours.dtype)
        length = float(ours.norm())
        value = cosine(target, ours)
        if value == 0 or length == 0:
            return value, {}
        slope = target / (float(target.norm()) * length) - value * ours / length**2
        return value, self._split(transform.adjoint(-slope), cut)

    def gradients(self, weights: Weights, cut: Cut, mask: Vector | None = None) -> tuple[Weights, Tensor]:
        """The loss's gradient with respect to the weights of a cut, and to the gates of all units."""
        leaves = {n: w.detach().requires_grad_(n in self.model.trainable) for n, w in weights.items()}
        like = next(leaf for leaf in leaves.values() if leaf.is_floating_point())
        open_ = np.ones(self.model.units.total) if mask is None else mask
        gates = torch.tensor(open_, dtype=like.dtype, device=like.device, requires_grad=True)
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        loss = self.loss(self.model.units.gated(leaves, gates, cut), cut)
        found = torch.autograd.grad(loss, [*(leaves[n] for n in names), gates], allow_unused=True)
        gradients = {
            name: torch.zeros_like(leaves[name]) if each is None else each
            for name, each in zip(names, found[:-1], strict=True)
        }
        return gradients, torch.zeros_like(gates) if found[-1] is None else found[-1]

    def at(self, cut: Cut) -> Weights:
        """The weights of a cut in the layout that runs fastest; statistics stay with their owner."""
        table, layout = self.model.table(cut), Layouts(self.model).at(cut)
        held = {n: w for n, w in self.weights.items() if n in table and n not in self.model.statistics}
        return laid_out({n: gather(w, table[n]) for n, w in held.items()}, layout)

    def _placed(self, gradient: Weights, cut: Cut) -> list[Tensor]:
        """A gradient at a cut as one of the full model: what the cut does not hold has none."""
        table, placed = self.model.table(cut), []
        for name in trained_names(self.model):
            full = torch.zeros_like(self.weights[name], dtype=gradient[name].dtype)
            scatter(full, table[name], gradient[name])
            placed.append(full)
        return placed

    def _split(self, vector: Tensor, cut: Cut) -> Weights:
        """A vector over all trained numbers as tensors at a cut."""
        table, names = self.model.table(cut), trained_names(self.model)
        parts = vector.split([self.weights[name].numel() for name in names])
        return {
            name: gather(part.view(self.weights[name].shape).to(self.weights[name].device), table[name])
            for name, part in zip(names, parts, strict=True)
        }

    def _sums(self, values: Weights, cut: Cut) -> Vector:
        """The sum over the numbers that belong to each unit, the unit that makes them; behind them all others."""
        sums = np.zeros(self.model.units.total + 1)
        for name, value in values.items():
            place = self.model.units.made_by(name)
            if place is None:
                sums[-1] += float(value.sum(dtype=torch.float64))
                continue
            each = value.double().movedim(place.dim, 0).flatten(1).sum(dim=1) if value.dim() > 1 else value
            np.add.at(sums, self.model.units.on(place, cut).numpy(), each.double().cpu().numpy())
        return sums


def held_units(model: ElasticModel, cut: Cut) -> Vector:
    """1 for every unit that a cut holds, 0 for the others."""
    held = np.ones(model.units.total)
    for group, part in model.units.slices.items():
        if group in cut.channels:
            held[part] = 0
            held[part][np.asarray(cut.channels[group])] = 1
    return held


def _norm(tensors: Any) -> float:
    return float(sum(float(value.double().square().sum()) for value in tensors) ** 0.5)
