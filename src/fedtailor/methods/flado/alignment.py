"""Which channels help a client's steps to follow the global trajectory: a cosine, and its gradient per channel.

    u(b, p) = -f g(b, s)                 the client's step; g = gradient of the loss, outputs of unit j times b_j s_j
    c(b, p) = cos(J delta, J u)          delta = the global update, J = the transform that it was sketched with
    C(p)    = E_b c(b, p)                b ~ Bernoulli(p): what is to rise

s = 1 / p where outputs are scaled and f = p where filters are slowed, else 1. Under another transform the cosine would
be noise, and the sign is that of descent. The gradient of C has two parts. *Along the path*, at a given mask, c depends
on p through s and f: exact, by differentiating twice. *By the draw*, c differs with and without unit j: the score
function (c - baseline) (b - p) / (p (1 - p)) is unbiased and noisy; dc/db, straight through the draw, is steady and
biased, because networks with kinks are not linear in a gate. Three estimates by passes of their own:

- ``score``: both parts on drawn networks alone.
- ``hessian``: straight through the draw, on the full network under a mask, so that units that were not drawn count too.
- ``surrogate``: u is taken for b s f times the step of the full network: a closed form, and no second derivative.

``following`` has a fourth that takes what it needs from the client's update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from fedtailor.methods.dropping import on_filter
from fedtailor.methods.flado.sketch import Transform, cosine

Loss = Callable[[Mapping[str, Tensor], Cut, Tensor], Tensor]  # of weights at a cut, and of all probabilities

DRAWS = 2  # networks that one estimate by the score function compares
PASSES = ("score", "hessian", "surrogate")
ONCE = (
    "derivative for",
    "differentiate twice",
    "not implemented",
)  # what PyTorch says of layers without a second one
TWICE = 3  # what a pass that is differentiated twice costs, in passes forward and backward


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


def estimate_macs(how: str, drawn: float, full: float, size: int) -> float:
    """Multiply-accumulates of one estimate, from those of a forward pass of the drawn and of the full network."""
    passes = {
        "score": TWICE * DRAWS * drawn,
        "hessian": TWICE * full,
        "surrogate": full,
    }
    transforms = {"score": DRAWS, "hessian": 1, "surrogate": 1}
    return 3 * passes[how] + 2 * transforms[how] * size * math.log2(size)


@dataclass(frozen=True)
class Slope:
    """c at a mask, and how it changes: with the probabilities along the path, and with the gates of the mask."""

    value: float
    path: Vector
    gates: Vector


@dataclass(frozen=True)
class Alignment:
    """One client's loss around its weights, compared with the global trajectory."""

    model: ElasticModel
    weights: Weights  # of the full model
    trajectory: Trajectory
    loss: Loss
    scaled: bool = False  # s = 1 / p: the loss divides outputs of drawn units by their probability
    slowed: bool = False  # f = p: the gradient of a drawn filter is multiplied by its probability

    def estimate(self, how: str, probabilities: Vector, cuts: Sequence[Cut]) -> tuple[Vector, float]:
        """How C changes with every unit's probability, and c, from drawn networks."""
        if how == "surrogate":
            return self.surrogate(probabilities)
        if how == "hessian":
            found = self.slope(cuts[0], probabilities, whole=True)
            return found.gates + found.path, found.value
        return self.score(cuts, probabilities)

    def score(self, cuts: Sequence[Cut], probabilities: Vector) -> tuple[Vector, float]:
        """Both parts from drawn networks, each measured against the mean of the others."""
        found = [self.slope(cut, probabilities) for cut in cuts]
        values = np.array([each.value for each in found])
        apart = np.stack([held_units(self.model, cut) for cut in cuts]) - probabilities
        others = (values.sum() - values) / (len(values) - 1)
        variance = np.clip(probabilities * (1 - probabilities), 1e-6, None)
        weights = np.where(probabilities < 1, apart / variance, 0)
        by_draw = ((values - others)[:, None] * weights).mean(axis=0)
        return by_draw + np.mean([each.path for each in found], axis=0), float(values.mean())

    def surrogate(self, probabilities: Vector) -> tuple[Vector, float]:
        """The closed form of ``expected_slope``, from one pass of the full network."""
        cut = Cut.everything()
        one = torch.ones(len(probabilities), dtype=torch.float64)
        gradient = {n: g.detach() for n, g in self.steps(self.at(cut), cut, one).items()}
        back = self._split(self.trajectory.transform.adjoint(self.trajectory.sketch), cut)
        along = unit_sums({n: -back[n] * g for n, g in gradient.items()}, cut, self.model)
        squares = unit_sums({n: g * g for n, g in gradient.items()}, cut, self.model)
        power = int(self.slowed) - int(
            self.scaled
        )  # u of a drawn unit is p ** power times that of the full network
        factor = probabilities**power
        slope = expected_slope(
            probabilities,
            np.append(along[:-1] * factor, along[-1]),
            np.append(squares[:-1] * factor**2, squares[-1]),
            power,
        )
        value, _ = self.compared(gradient, cut)
        return slope / max(float(self.trajectory.sketch.norm()), 1e-30), value

    def slope(self, drawn: Cut, probabilities: Vector, whole: bool = False) -> Slope:
        """c at a drawn mask and its two gradients; with ``whole`` on the full network under the mask, gates and all."""
        cut, total = Cut.everything() if whole else drawn, self.model.units.total
        weights = self.at(cut)
        p = torch.tensor(probabilities, requires_grad=True)
        mask = torch.tensor(held_units(self.model, drawn), requires_grad=True) if whole else None
        twice = self.scaled or self.slowed or whole
        found = self.steps(weights, cut, p, mask, graph=twice)
        value, toward = self.compared({n: g.detach() for n, g in found.items()}, cut)
        if not twice or not toward:
            return Slope(value, np.zeros(total), np.zeros(total))
        try:
            path, gates = _pulled(found, toward, p, mask)
        except RuntimeError as error:
            if not any(words in str(error) for words in ONCE):
                raise
            path, gates = self._by_difference(weights, cut, toward, p, mask)
        return Slope(value, path, gates)

    def steps(
        self, weights: Weights, cut: Cut, p: Tensor, mask: Tensor | None = None, graph: bool = False
    ) -> Weights:
        """f g: what a client's step is made of at a cut; with ``graph`` differentiable by probabilities and gates."""
        leaves = {n: w.detach().requires_grad_(n in self.model.trainable) for n, w in weights.items()}
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        gated = leaves if mask is None else self.model.units.gated(leaves, mask, cut)
        loss = self.loss(gated, cut, p)
        given = torch.autograd.grad(loss, [leaves[n] for n in names], allow_unused=True, create_graph=graph)
        found = {}
        for name, each in zip(names, given, strict=True):
            gradient = torch.zeros_like(leaves[name]) if each is None else each
            factor = on_filter(p.to(gradient), name, cut, self.model) if self.slowed else None
            found[name] = gradient if factor is None else gradient * factor
        return found

    def _by_difference(
        self, weights: Weights, cut: Cut, toward: Weights, p: Tensor, mask: Tensor | None
    ) -> tuple[Vector, Vector]:
        """The same where a layer cannot be differentiated twice: <v, f dg/dx> is the slope of dloss/dx along f v."""
        direction = dict(toward)
        for name, value in toward.items() if self.slowed else ():
            factor = on_filter(p.detach().to(value), name, cut, self.model)
            direction[name] = value if factor is None else value * factor
        size, steepness = _norm(weights[n] for n in direction), _norm(direction.values())
        step = torch.finfo(next(iter(direction.values())).dtype).eps ** (1 / 3) * size / max(steepness, 1e-30)
        sides = []
        for sign in (1, -1):
            moved = {n: w + sign * step * direction[n] if n in direction else w for n, w in weights.items()}
            gated = moved if mask is None else self.model.units.gated(moved, mask, cut)
            wanted = [each for each in (p, mask) if each is not None]
            given = torch.autograd.grad(self.loss(gated, cut, p), wanted, allow_unused=True)
            sides.append([_vector(each, p) for each in given])
        path, gates = (
            (sides[0][k] - sides[1][k]) / (2 * step) if k < len(sides[0]) else np.zeros(len(p))
            for k in (0, 1)
        )
        if self.slowed:  # f itself: <v, g>
            still = None if mask is None else mask.detach()
            raw = replace(self, slowed=False).steps(weights, cut, p.detach(), still)
            products = {n: toward[n] * g for n, g in raw.items()}
            path = path + unit_sums(products, cut, self.model, filters=True)[:-1]
        return path, gates

    def compared(self, gradient: Weights, cut: Cut) -> tuple[float, Weights]:
        """c of the step along minus this, and its derivative with respect to it at a cut."""
        transform, target = self.trajectory.transform, self.trajectory.sketch
        ours = transform(self._placed(gradient, cut)).neg_()
        target = target.to(ours.dtype)
        length = float(ours.norm())
        value = cosine(target, ours)
        if value == 0 or length == 0:
            return value, {}
        slope = target / (float(target.norm()) * length) - value * ours / length**2
        return value, self._split(transform.adjoint(-slope), cut)

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
        table = self.model.table(cut)
        whole = by_tensor(vector, self.weights, self.model)
        return {name: gather(part, table[name]) for name, part in whole.items()}


def by_tensor(vector: Tensor, weights: Mapping[str, Tensor], model: ElasticModel) -> Weights:
    """A vector over all trained numbers as tensors of the full model."""
    names = trained_names(model)
    parts = vector.split([weights[name].numel() for name in names])
    return {
        name: part.view(weights[name].shape).to(weights[name].device)
        for name, part in zip(names, parts, strict=True)
    }


def expected_slope(probabilities: Vector, along: Vector, squares: Vector, power: int) -> Vector:
    """dC/dp where drawn units do not change each other's steps: C = A / sqrt(S), up to the length of the trajectory.

    ``along`` and ``squares`` hold <delta, u> and |u|^2 of every unit's filter in steps that it is drawn for, behind
    them those of all other numbers, which are always there. With u growing as p ** power, A = sum of p <delta, u> and
    S = sum of p |u|^2 grow as p ** (1 + power) and p ** (1 + 2 power) in each unit.
    """
    aligned = float(probabilities @ along[:-1] + along[-1])
    square = float(probabilities @ squares[:-1] + squares[-1])
    if square <= 0:
        return np.zeros(len(probabilities))
    rise, growth = (1 + power) * along[:-1], (1 + 2 * power) * squares[:-1]
    return np.asarray(rise / square**0.5 - aligned * growth / (2 * square**1.5))


def unit_sums(values: Weights, cut: Cut, model: ElasticModel, filters: bool = False) -> Vector:
    """The sum over each unit's numbers, and over all others; ``filters``: those that ``slowed`` multiplies alone."""
    sums = np.zeros(model.units.total + 1)
    for name, value in values.items():
        place = model.units.made_by(name)
        if place is None or (filters and on_filter(torch.zeros(model.units.total), name, cut, model) is None):
            sums[-1] += float(value.sum(dtype=torch.float64))
            continue
        each = value.double().movedim(place.dim, 0).flatten(1).sum(dim=1) if value.dim() > 1 else value
        np.add.at(sums, model.units.on(place, cut).numpy(), each.double().cpu().numpy())
    return sums


def held_units(model: ElasticModel, cut: Cut) -> Vector:
    """1 for every unit that a cut holds, 0 for the others."""
    held = np.ones(model.units.total)
    for group, part in model.units.slices.items():
        if group in cut.channels:
            held[part] = 0
            held[part][np.asarray(cut.channels[group])] = 1
    return held


def _pulled(found: Weights, toward: Weights, p: Tensor, mask: Tensor | None) -> tuple[Vector, Vector]:
    """<v, d(f g)/dx> for the probabilities and the gates."""
    outputs = [name for name in toward if found[name].requires_grad]
    if not outputs:
        return np.zeros(len(p)), np.zeros(len(p))
    wanted = [each for each in (p, mask) if each is not None]
    given = torch.autograd.grad(
        [found[n] for n in outputs], wanted, [toward[n].to(found[n]) for n in outputs], allow_unused=True
    )
    vectors = [_vector(each, p) for each in given]
    return vectors[0], vectors[1] if mask is not None else np.zeros(len(p))


def _vector(gradient: Tensor | None, like: Tensor) -> Vector:
    return np.zeros(len(like)) if gradient is None else gradient.detach().double().cpu().numpy()


def _norm(tensors: Any) -> float:
    return float(sum(float(value.double().square().sum()) for value in tensors) ** 0.5)
